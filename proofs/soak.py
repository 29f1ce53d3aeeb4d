"""The soak, `python -m proofs.soak`: a batch whose engine and server are killed at random moments, and then balanced.

Nothing is forked or shortened here: the commands are `lab.py` as a user types it. At the end of each round the batch
runs to its end without kills; then the world's own file must hold exactly one right ticket for each operation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 600.0
ROUNDS = 5  # of the unhurried batch and its grants, until a run that has not ended counts as stuck


def tell(line: str) -> None:
    """Say it on standard error."""
    print(line, file=sys.stderr, flush=True)


class Round:
    """One batch on a folder of its own."""

    def __init__(self, place: Path, draw: random.Random, runs: int, mean_s: float) -> None:
        self._state = place / "state"
        self._goals = place / "goals.jsonl"
        self._out = place / "answers.jsonl"
        self._draw = draw
        self._mean_s = mean_s
        self.kills: Counter[str] = Counter()
        self.granted = 0
        self.wanted = {f"soak-{n:06d}": {"source": f"s-{n}", "title": f"Check {n}"} for n in range(runs)}
        lines = (json.dumps({"run": run, **goal}) for run, goal in self.wanted.items())
        self._goals.write_text("\n".join(lines) + "\n")

    def _start(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "lab.py", "--state-dir", str(self._state), "--batch", str(self._goals)]
        with self._out.open("wb") as out, self._out.with_suffix(".err").open("ab") as err:
            return subprocess.Popen([*argv, "--execute", "--json"], cwd=ROOT, stdout=out, stderr=err)

    def harass(self, until: float) -> None:
        """Kill random parts of the batch, and start it again when it ended, until the time is up or all is done."""
        batch = self._start()
        while time.monotonic() < until:
            with suppress(subprocess.TimeoutExpired):
                if batch.wait(self._draw.expovariate(1 / self._mean_s)) == 0:
                    return
                batch = self._start()
                continue
            victim = self._draw.choice(("engine", "server"))
            pids = [batch.pid] if victim == "engine" else _children(batch.pid)
            for pid in pids[:1]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.kills[victim] += 1
        batch.kill()
        batch.wait()
        self.kills["engine"] += 1

    def finish(self) -> dict[str, dict[str, Any]]:
        """Run the batch without kills; a person grants where a run asks for it. The last answer of each run."""
        told: dict[str, dict[str, Any]] = {}
        for _ in range(ROUNDS):
            code = self._start().wait(LIMIT_S)
            told = {answer["run"]: answer for answer in map(json.loads, self._out.read_text().splitlines())}
            if code == 0:
                break
            for answer in told.values():
                if (answer["next"] or {}).get("action") == "ask_operator":
                    argv = shlex.split(answer["next"]["command"])[1:]
                    subprocess.run([sys.executable, *argv], cwd=ROOT, check=True, capture_output=True)
                    self.granted += 1
        return told

    def balance(self, told: dict[str, dict[str, Any]]) -> list[str]:
        """Every fault in the books: the world's own file against the goals and what was told."""
        with closing(sqlite3.connect(self._state / "tickets.sqlite")) as world:
            rows = world.execute("select op, payload from tickets").fetchall()
        found: dict[str, list[Any]] = {}
        for op, payload in rows:
            found.setdefault(op, []).append(json.loads(payload))
        faults = [f"{op}: nobody asked for it" for op in found if op.removesuffix(":ticket") not in self.wanted]
        for run, goal in self.wanted.items():
            tickets, answer = found.get(f"{run}:ticket", []), told.get(run)
            if tickets != [goal]:
                faults.append(f"{run}: the world has {tickets}")
            if answer is None or (answer["state"] != "succeeded" and not answer["next"]):
                faults.append(f"{run}: stuck, {answer and answer['state']}")
            elif answer["state"] in ("failed", "cancelled"):
                faults.append(f"{run}: told {answer['state']}")
        return faults


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _words(task / "children")]
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def main() -> int:
    """Run rounds until the time is up; exit code 1 when the books of one do not balance."""
    parser = argparse.ArgumentParser(prog="python -m proofs.soak", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--runs", type=int, default=2000, help="of a round (default: %(default)s)")
    parser.add_argument("--mean-s", type=float, default=2.0, help="between two kills (default: %(default)s)")
    args = parser.parse_args()
    tell(f"seed {args.seed}")
    until, number, bad = time.monotonic() + 60 * args.minutes, 0, 0
    total: Counter[str] = Counter()
    while time.monotonic() < until:
        number += 1
        with tempfile.TemporaryDirectory(prefix="soak-") as place:
            one = Round(Path(place), random.Random(f"{args.seed}/{number}"), args.runs, args.mean_s)
            one.harass(until)
            faults = one.balance(one.finish())
        total += one.kills
        bad += len(faults)
        kills = " and ".join(f"{count} of the {part}" for part, count in sorted(one.kills.items())) or "none"
        tell(f"round {number}: {args.runs} runs, kills: {kills}; {one.granted} granted; {len(faults)} faults")
        for fault in faults[:20]:
            tell(f"  {fault}")
    tell(f"{number * args.runs} runs, {total.total()} kills, {bad} faults; seed {args.seed}")
    if bad:
        tell(f"again: python -m proofs.soak --minutes {args.minutes:g} --seed {args.seed} --runs {args.runs}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
