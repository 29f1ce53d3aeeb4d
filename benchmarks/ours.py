"""This engine, through its public interface. Each command is a process and prints one JSON object.

- `steps`: the journal alone: a run is opened and S - 1 events of 200 bytes are recorded.
- `drive`: whole runs of 8 transitions through the engine's loop; the model and the tool do nothing.
- `recover`: the same with a tool whose world is a file; the process kills itself at half of all transitions, and
  `--again` opens every run once more and drives it to its end.
- `loop`: one of several processes that record into the same journal.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import random
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.floor import wait_for_begin
from miniharness.contract import Contract, Tool
from miniharness.engine import Answer, Model, Ports, drive
from miniharness.errors import StoreError
from miniharness.machine import Dispatch, Event, EventType, Outcome, Run, State, Step
from miniharness.runs import Runs
from peers import world

DETAIL = json.loads(world.PAYLOAD)
CONTRACT = Contract(
    goal=DETAIL,
    tool=Tool(name="write", resource="thing", fences=True, deduplicates=True),
    provider="fixture",
    model="none",
    command="none",
)
TRANSITIONS = 8
"""Of a whole run: opened, model requested, proposed, connected, looked up, intended, answered, looked up."""


async def in_flight(count: int, runs: int, work: Callable[[str], Awaitable[object]]) -> float:
    """Do `work` for so many runs, at most `count` at a time; returns the seconds that it took."""
    names = iter([f"run-{number:05d}" for number in range(runs)])

    async def client() -> None:
        for name in names:
            await work(name)

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(count)))
    return time.perf_counter() - started


async def steps(options: argparse.Namespace) -> dict[str, float]:
    """The journal alone."""
    with closing(Runs(options.folder)) as runs:

        async def record(name: str) -> None:
            run = await runs.open(name, CONTRACT)
            await asyncio.sleep(0)  # as the engine's loop does
            for _ in range(options.steps - 1):
                run = await runs.record(run, Event(EventType.CONNECTED, DETAIL))
            runs.leave(run)

        return await _timed(options, record)


async def driven(options: argparse.Namespace) -> dict[str, float]:
    """Whole runs; what the model proposes is the goal, and what was dispatched is there."""
    with closing(Runs(options.folder)) as runs:

        async def whole(name: str) -> None:
            run = await drive(runs, await runs.open(name, CONTRACT), Ports(propose, Idle()), permit=True)
            assert (run.state, run.version) == (State.SUCCEEDED, TRANSITIONS), run

        if options.among:
            await whole("seed")
            _copy("seed", options.among, options.folder)
        return await _timed(options, whole)


def _copy(run: str, count: int, folder: Path) -> None:
    """Store so many finished runs more, each like `run`."""
    with closing(sqlite3.connect(folder / "runs.sqlite")) as connection:
        for table, named in (("runs", "id"), ("events", "run")):
            columns = [row[1] for row in connection.execute(f"pragma table_info({table})") if row[1] != named]
            connection.execute(
                "with recursive n (i) as (select 1 union all select i + 1 from n where i < ?)"
                f" insert into {table} ({named}, {', '.join(columns)})"
                f" select 'copy-' || i, {', '.join(columns)} from n, {table} where {named} = ?",
                (count, run),
            )
        connection.commit()
        connection.execute("pragma wal_checkpoint(truncate)")


async def _timed(options: argparse.Namespace, work: Callable[[str], Awaitable[object]]) -> dict[str, float]:
    await work("warm-up")
    first_s, before = world.age_s(), stored_bytes(options.folder)
    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    seconds = await in_flight(options.in_flight, options.runs, work)
    if options.profile:
        profile.disable()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    grown = stored_bytes(options.folder) - before
    return {"seconds": seconds, "bytes": grown, "rss_kb": peak_kb(), "first_s": first_s}


async def propose(goal: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The model: proposes the goal."""
    return goal, {}


class Idle:
    """A tool that does nothing and remembers that it did; like every real one it lets others run meanwhile."""

    def __init__(self) -> None:
        self._found: Mapping[str, Any] | None = None

    async def connect(self) -> Mapping[str, Any]:
        """Be ready."""
        return {"server": "idle"}

    async def look_up(self, key: str, epoch: int) -> Mapping[str, Any] | None:
        """What was dispatched."""
        await asyncio.sleep(0)
        return self._found

    async def dispatch(self, key: str, action: Mapping[str, Any], epoch: int) -> Answer:
        """Remember it."""
        await asyncio.sleep(0)
        self._found = {"id": 1, "action": action}
        return Answer(Outcome.RETURNED)


# -- recovery ----------------------------------------------------------------------------------------------------------


class World:
    """A file with a line for each request that reached the outside; what was dispatched is there for good."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "world.txt", os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self.lines = os.pread(self._file, 1 << 30, 0).decode().splitlines()
        self._there = {line[2:] for line in self.lines if line[0] == "D"}

    def note(self, what: str, key: str) -> None:
        """Append a line."""
        os.write(self._file, f"{what} {key}\n".encode())
        self.lines.append(f"{what} {key}")

    def is_there(self, key: str) -> bool:
        """Whether the effect of this key has happened."""
        return key in self._there

    def blind_repeats(self) -> int:
        """How many dispatches followed one of the same key without a look-up in between."""
        last: dict[str, str] = {}
        blind = 0
        for line in self.lines:
            what, key = line.split(" ")
            blind += what == "D" and last.get(key) == "D"
            last[key] = what
        return blind

    def repeated(self, what: str) -> int:
        """How many requests of this kind were repeats."""
        times = Counter(line for line in self.lines if line[0] == what)
        return sum(times.values()) - len(times)

    async def connect(self) -> Mapping[str, Any]:
        """Be ready."""
        return {"server": "file"}

    async def look_up(self, key: str, epoch: int) -> Mapping[str, Any] | None:
        """What stands in the file."""
        self.note("L", key)
        return {"id": 1, "action": CONTRACT.goal} if key in self._there else None

    async def dispatch(self, key: str, action: Mapping[str, Any], epoch: int) -> Answer:
        """Append a line; the effect is there whatever becomes of the answer."""
        self.note("D", key)
        self._there.add(key)
        return Answer(Outcome.RETURNED)


class Spread(Ports):
    """Ports whose requests and answers take 0 to 7 turns of the loop each; a run begins up to 90 turns late.

    So the runs are at different places when the process dies: in a dispatch, after its effect and before its answer,
    as soon as half of all transitions are done.
    """

    performed = 0
    kill_after = 0
    _begun = False

    async def perform(self, step: Step) -> Event:
        """Perform the step, and be killed if it was the last one granted."""
        await self._travel(8 if self._begun else 90)
        self._begun = True
        event = await super().perform(step)
        Spread.performed += 1
        sent = isinstance(step, Dispatch) and event.type is EventType.DISPATCH_ANSWERED
        if sent and self.kill_after and Spread.performed >= self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        await self._travel(8)
        return event

    async def _travel(self, turns: int) -> None:
        for _ in range(random.randrange(turns) if self.kill_after else 0):
            await asyncio.sleep(0)


async def recover(options: argparse.Namespace) -> dict[str, float]:
    """Open every run, then drive all of them at once."""
    names = [f"run-{number:05d}" for number in range(options.runs)]
    outside = World(options.folder)
    random.seed(1)
    Spread.kill_after = 0 if options.again else options.runs * TRANSITIONS // 2 - options.runs  # opening is one
    with closing(Runs(options.folder)) as runs:
        opened: list[Run] = await asyncio.gather(*(runs.open(name, CONTRACT) for name in names))

        def model(name: str) -> Model:
            async def ask(goal: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
                outside.note("M", name)
                return await propose(goal)

            return ask

        in_doubt = sum(run.state is State.DISPATCHING and outside.is_there(run.key) for run in opened)
        assert in_doubt or not options.again, "no answer was lost in the kill: this proves nothing"
        ended = await asyncio.gather(*(drive(runs, run, Spread(model(run.id), outside), permit=True) for run in opened))
        seconds = world.age_s()
        assert all(run.state is State.SUCCEEDED for run in ended)
        sent = sum(line[0] == "D" for line in outside.lines)
        debited = sum(run.dispatches_spent for run in ended)
        again = {what: outside.repeated(what) for what in "DML"}
        again["L"] -= options.runs  # each run looks up once before its dispatch and once after it
        return {
            "seconds": seconds,
            "writes_again": again["D"],
            "requests_again": sum(again.values()),
            "blind": outside.blind_repeats(),
            "in_doubt": in_doubt,
            "sent": sent,
            "debited": debited,
        }


# -- several processes -------------------------------------------------------------------------------------------------


async def loop(options: argparse.Namespace) -> dict[str, float]:
    """Record until the time is over, together with whoever else writes this journal: how many, and the slowest."""
    count, worst, errors = 0, 0.0, 0
    with closing(Runs(options.folder)) as runs:
        run = await runs.open(f"p{os.getpid()}", CONTRACT)
        begin = wait_for_begin()
        while (now := time.time()) < begin + options.seconds:
            try:
                run = await runs.record(run, Event(EventType.CONNECTED, DETAIL))
                count += 1
            except StoreError:
                errors += 1
            worst = max(worst, time.time() - now)
    return {"count": count, "worst_s": worst, "errors": errors}


def stored_bytes(folder: Path) -> int:
    """The size of the journal, when what the write-ahead log holds has been copied into it."""
    with closing(sqlite3.connect(folder / "runs.sqlite")) as connection:
        connection.execute("pragma wal_checkpoint(passive)")
    return (folder / "runs.sqlite").stat().st_size


def peak_kb() -> int:
    """The most memory that this process has held."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def main() -> None:
    """Run one command and print its answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["steps", "drive", "recover", "loop"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--among", type=int, default=0, help="so many finished runs in the same journal")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print to standard error where the time goes")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    command = {"steps": steps, "drive": driven, "recover": recover, "loop": loop}[options.command]
    sys.stdout.write(json.dumps(asyncio.run(command(options))) + "\n")


if __name__ == "__main__":
    main()
