"""What is measured of the floor, of this engine and of whole processes: each measure starts child processes.

Every function returns figures by name; it knows neither tables nor cycles.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
PATIENCE_S = 600.0

Figures = dict[str, float]


@dataclass(frozen=True)
class Sizes:
    """How much of everything: `full` for the published figures, `quick` to see that it works."""

    rounds: int  # pairs of floor and engine in a cycle
    short: int  # runs of 6 steps, one at a time
    long: int  # runs of 100 steps, one at a time
    flying: int  # runs of 6 steps, 32 in flight; 100 steps: a twentieth
    recovered: int
    loop_s: float
    starts: int  # of whole processes
    batch: int  # runs of the whole lab
    stored: int  # finished runs in a large store


FULL = Sizes(rounds=5, short=150, long=10, flying=2000, recovered=200, loop_s=2.0, starts=6, batch=1000, stored=100_000)
QUICK = Sizes(rounds=2, short=30, long=3, flying=200, recovered=200, loop_s=0.5, starts=2, batch=100, stored=2000)


@contextmanager
def fresh_folder(parent: Path) -> Iterator[Path]:
    """A new folder on the disk that is measured, removed afterwards."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ask(command: Sequence[object], *, dies: bool = False) -> dict[str, Any]:
    """Run a process and return its JSON object; one that `dies` by SIGKILL has none.

    Raises:
        RuntimeError: it ended otherwise; what it said stands in the message.
    """
    child = subprocess.run(
        [str(word) for word in command], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    if dies and child.returncode == -signal.SIGKILL:
        return {}
    if dies or child.returncode:
        raise RuntimeError(f"{command[1:4]} ended with {child.returncode}: {child.stderr[-500:]}")
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return answer


def ours(*words: object, dies: bool = False) -> dict[str, Any]:
    """Ask a process of this engine."""
    return ask([sys.executable, "-m", "benchmarks.ours", *words], dies=dies)


def floor(*words: object) -> dict[str, Any]:
    """Ask a process of SQLite alone."""
    return ask([sys.executable, "-m", "benchmarks.floor", *words])


def sync(parent: Path) -> Figures:
    """How long the disk takes now."""
    with fresh_folder(parent) as folder:
        return {"sync.ms": floor("sync", folder, "--runs", 300)["p50_s"] * 1000}


def one_at_a_time(parent: Path, sizes: Sizes) -> Figures:
    """Milliseconds per run of 6 and of 100 steps; floor and engine take turns, each figure is a median of rounds."""
    seen: dict[str, list[float]] = {}

    def note(name: str, runs: int, answer: dict[str, Any]) -> None:
        seen.setdefault(name, []).append(answer["seconds"] / runs * 1000)

    for _ in range(sizes.rounds):
        for count, runs in ((6, sizes.short), (100, sizes.long)):
            how = ("--steps", count, "--runs", runs)
            with fresh_folder(parent) as folder:
                note(f"floor.{count}.ms", runs, floor("steps", folder / "a", *how))
                note(f"ours.{count}.ms", runs, ours("steps", folder / "b", *how))
                note(f"raw.{count}.ms", runs, floor("steps", folder / "c", *how, "--moves"))
                if count == 6:
                    note("ours.whole.ms", runs, ours("drive", folder / "d", "--runs", runs))
                    note("floor.8.ms", runs, floor("steps", folder / "e", "--steps", 8, "--runs", runs))
    return {name: statistics.median(values) for name, values in seen.items()}


def in_flight(parent: Path, sizes: Sizes) -> Figures:
    """Steps per second with 32 runs in flight, and what one run of 6 steps costs in bytes, memory and start."""
    figures = {}
    for count, runs in ((6, sizes.flying), (100, max(sizes.flying // 20, 32))):
        with fresh_folder(parent) as folder:
            answer = ours("steps", folder, "--steps", count, "--runs", runs, "--in-flight", 32)
        figures[f"ours.flying.{count}.steps/s"] = count * runs / answer["seconds"]
        if count == 6:
            figures["ours.rss.MB"] = answer["rss_kb"] / 1024
            figures["ours.first.ms"] = answer["first_s"] * 1000
            figures["ours.bytes.kB"] = answer["bytes"] / runs / 1000
    with fresh_folder(parent) as folder:
        answer = ours("drive", folder, "--runs", sizes.flying, "--in-flight", 32)
    figures["ours.whole.runs/s"] = sizes.flying / answer["seconds"]
    return figures


def recovery(parent: Path, sizes: Sizes) -> Figures:
    """Kill 200 runs half-way, and see how long a new process needs to end them all."""
    with fresh_folder(parent) as folder:
        ours("recover", folder, "--runs", sizes.recovered, dies=True)
        answer = ours("recover", folder, "--runs", sizes.recovered, "--again")
    assert answer["sent"] <= answer["debited"], answer
    return {
        "ours.recovery.s": answer["seconds"],
        "ours.recovery.again": answer["requests_again"],
        "ours.recovery.writes": answer["writes_again"],
        "ours.recovery.blind": answer["blind"],
        "ours.recovery.doubt": answer["in_doubt"],
        "ours.recovery.unused": answer["debited"] - answer["sent"],
    }


def many_processes(parent: Path, sizes: Sizes) -> Figures:
    """Steps per second of 1, 4 and 16 processes on one file, and the slowest single step."""
    figures = {}
    for count in (1, 4, 16):
        for who in ("floor", "ours"):
            with fresh_folder(parent) as folder:
                told = _together(who, folder, count, sizes.loop_s)
            figures[f"{who}.many.{count}.steps/s"] = sum(one["count"] for one in told) / sizes.loop_s
            figures[f"{who}.many.{count}.worst.ms"] = max(one["worst_s"] for one in told) * 1000
            figures[f"{who}.many.{count}.errors"] = sum(one["errors"] for one in told)
    return figures


def _together(who: str, folder: Path, count: int, seconds: float) -> list[dict[str, Any]]:
    words = [sys.executable, "-m", f"benchmarks.{who}", "loop", str(folder), "--seconds", str(seconds)]
    pipe = subprocess.PIPE
    children = [subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
    for child in children:
        assert child.stdout
        assert child.stdout.readline() == "ready\n", "a process ended early"
    begin = f"{time.time() + 0.2}\n"
    told = []
    for child in children:
        assert child.stdin
        child.stdin.write(begin)
        child.stdin.flush()
    for child in children:
        told.append(json.loads(child.communicate(timeout=PATIENCE_S)[0]))
    assert all(one["count"] + one["errors"] for one in told), f"a process took no step: {told}"
    return told


def large_stores(parent: Path, sizes: Sizes) -> Figures:
    """Milliseconds for a whole run of 8 transitions in a journal with few and with many finished runs."""
    figures = {}
    for name, stored in (("few", 10), ("many", sizes.stored)):
        with fresh_folder(parent) as folder:
            answer = ours("drive", folder, "--runs", sizes.short, "--among", stored)
        figures[f"ours.{name}.ms"] = answer["seconds"] / sizes.short * 1000
    return figures | {"ours.stored": float(sizes.stored)}


def whole_processes(parent: Path, sizes: Sizes) -> Figures:
    """Milliseconds from start to exit of whole commands, which take turns."""
    seen: dict[str, list[float]] = {}

    def timed(name: str, *words: object) -> None:
        command = [sys.executable, *(str(word) for word in words)]
        started = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE_S)
        seen.setdefault(name, []).append((time.perf_counter() - started) * 1000)

    for number in range(sizes.starts):
        with fresh_folder(parent) as folder:
            timed("pass.ms", "-c", "pass")
            timed("plain.ms", "benchmarks/plain_sdk.py", folder / "plain.sqlite")
            timed("lab.ms", "lab.py", "--state-dir", folder / "lab", "--execute")
            timed("reread.ms", "lab.py", "--state-dir", folder / "lab")
        if number == 0 and sizes.starts > 2:
            seen.clear()  # the first one fills the page cache and the compiled files
    return {name: statistics.median(values) for name, values in seen.items()}


# -- the whole lab -----------------------------------------------------------------------------------------------------


def whole_lab(parent: Path, sizes: Sizes) -> Figures:
    """Runs per second of `lab.py --batch` with 32 in flight, and the processor time of engine and servers per run.

    Beside it the same calls by the SDK's own client, without a journal, a budget or a model.
    """
    told = subprocess.run([sys.executable, "lab.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    if "--batch" not in told.stdout:
        return {}
    figures = {}
    with fresh_folder(parent) as folder:
        words = [sys.executable, "benchmarks/plain_sdk.py", folder / "plain.sqlite", str(sizes.batch)]
        plain = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        figures["plain.runs/s"] = float(plain.stdout)
    for servers in (1, 2):
        with fresh_folder(parent) as folder:
            for name, value in _batch(folder, sizes.batch, servers).items():
                figures[f"batch.{servers}.{name}"] = value
    return figures


def _batch(folder: Path, runs: int, servers: int) -> Figures:
    goals = folder / "goals.jsonl"
    lines = [json.dumps({"run": f"b-{n}", "source": f"s-{n}", "title": f"Check {n}"}) for n in range(runs)]
    goals.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "lab.py", "--state-dir", folder / "lab", "--batch", goals, "--execute", "--json"]
    words = [str(word) for word in [*command, "--concurrency", 32, "--servers", servers]]
    started, times = time.perf_counter(), []
    with (folder / "err.txt").open("w+") as errors:
        child = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        clocks = Clocks(child.pid)
        assert child.stdout
        for line in child.stdout:
            times.append(time.perf_counter())
            assert json.loads(line)["state"] == "succeeded", line[:500]
        child.wait(timeout=PATIENCE_S)
        seconds = time.perf_counter() - started
        clocks.stop()
    assert len(times) == runs, f"{len(times)} reports of {runs} runs"
    busy = times[-1] - times[0]
    return {
        "runs/s": runs / seconds,
        "steady.runs/s": (runs - 1) / busy,
        "engine.ms": clocks.engine_s / runs * 1000,
        "servers.ms": clocks.servers_s / runs * 1000,
        "engine.busy": clocks.engine_s / seconds,
        "servers.busy": clocks.servers_s / seconds,
    }


class Clocks:
    """Looks every 20 ms at the processor time of a process and of its children."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.02):
            with suppress(OSError):
                children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
                for pid in [self._pid, *map(int, children)]:
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    self._used[pid] = (int(fields[11]) + int(fields[12])) / TICKS

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    @property
    def engine_s(self) -> float:
        """Of the process itself."""
        return self._used.get(self._pid, 0.0)

    @property
    def servers_s(self) -> float:
        """Of its children."""
        return sum(used for pid, used in self._used.items() if pid != self._pid)
