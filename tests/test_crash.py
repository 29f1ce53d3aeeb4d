"""Killed before any SQL statement, on either side, once or over and over: one ticket, within the budget, provably."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import select
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import TimeoutExpired
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import pytest
from conftest import GOAL, Lab, tickets
from forked import ROOT
from killed_at import PROGRAM, Killed, Watch, mortal

from miniharness import faults
from miniharness.contract import Budget, Contract, Tool
from miniharness.engine import Answer, Ports, drive
from miniharness.errors import ToolUnavailable
from miniharness.machine import Event, EventType, Outcome, Run, State
from store import Refused, Runs, Ticket, Tickets

RUN = "review-001"
CONTRACT = Contract(
    goal=GOAL,
    tool=Tool(name="create_review_ticket", resource="ticket", fences=True, deduplicates=True),
    provider="fixture",
    model="scripted-1",
    command="python lab.py",
)
GRANT = Event(EventType.GRANTED, {"dispatches": 1, "by": "ada", "why": "looked myself"})
ONE_TICKET = [(f"{RUN}:ticket", GOAL)]


class Local:
    """The ticket server's store as the tool, with no protocol between; once killed it answers nobody."""

    def __init__(self, folder: Path, watch: Watch) -> None:
        self._path = folder / "tickets.sqlite"
        self._watch = watch

    def _alive(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Killed:
            self._watch.bury()
            raise ToolUnavailable("the server is gone") from None
        except sqlite3.ProgrammingError as error:
            raise ToolUnavailable("the server is gone") from error

    async def connect(self) -> dict[str, Any]:
        self._tickets = self._alive(lambda: Tickets(self._path))
        return {}

    async def look_up(self, key: str, epoch: int) -> dict[str, Any] | None:
        ticket: Ticket | None = self._alive(lambda: self._tickets.look_up(key, epoch))
        return ticket.model_dump() if ticket else None

    async def dispatch(self, key: str, action: Any, epoch: int) -> Answer:
        try:
            self._alive(lambda: self._tickets.create(key, action, epoch))
        except ToolUnavailable as error:
            return Answer(Outcome.UNKNOWN, str(error))
        except Refused as error:
            return Answer(Outcome.REFUSED, str(error))
        return Answer(Outcome.RETURNED)


class Deadly(Local):
    """The process dies in the dispatch window, before the write or after it."""

    def __init__(self, folder: Path, watch: Watch, *, after: bool = False) -> None:
        super().__init__(folder, watch)
        self._after = after
        self.kills = 0

    async def dispatch(self, key: str, action: Any, epoch: int) -> Answer:
        if self._after:
            await super().dispatch(key, action, epoch)
        self.kills += 1
        raise Killed


async def agree(goal: Any) -> Any:
    return dict(goal), {}


@dataclass
class Life:
    """How one life of the engine's process went: the run it ended with, if it was not killed or cut short."""

    run: Run | None
    engine: Watch
    server: Watch
    killed: bool = False


@contextmanager
def processes(engine: Watch, server: Watch) -> Iterator[None]:
    """Inside, each side's connections are watched; at the end both sides are gone without a word."""

    def connect(path: Any, **options: Any) -> sqlite3.Connection:
        return (engine if "runs.sqlite" in str(path) else server).connect(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", connect)
        try:
            yield
        finally:
            engine.bury()
            server.bury()


async def live(
    folder: Path,
    engine: int = 0,
    server: int = 0,
    *,
    contract: Contract = CONTRACT,
    permit: bool = True,
    tool: Callable[[Path, Watch], Local] = Local,
) -> Life:
    """Open the run and drive it, with each side dying before its k-th statement."""
    life = Life(None, mortal(engine), mortal(server))
    runs = None
    with processes(life.engine, life.server):
        try:
            runs = Runs(folder)
            run = await runs.open(RUN, contract)
            ports = Ports(agree, tool(folder, life.server))
            life.run = await drive(runs, run, ports, permit)
        except Killed:
            life.killed = True
        except ToolUnavailable:
            pass
        finally:
            if runs and runs._owner:
                runs._owner._file.close()  # the system drops the lock of a dead process; the file stays
    return life


async def finish(folder: Path) -> Run:
    """Go on without accidents to the end; the operator grants one dispatch when the budget is spent."""
    life = await live(folder)
    assert life.run
    if life.run.state is State.RECONCILE_REQUIRED:
        runs = Runs(folder)
        runs.request(RUN, GRANT, while_driven=False)
        runs.close()
        life = await live(folder)
        assert life.run
    return life.run


def kept(folder: Path) -> Run:
    """The promise: one ticket, a checked success, a budget that held, and a history that gives the row."""
    runs = Runs(folder)
    run, faults_found = runs.require(RUN), runs.replay(RUN)
    intents = [event for event in runs.events(RUN) if event.type is EventType.DISPATCH_INTENDED]
    runs.close()
    assert tickets(folder) == ONE_TICKET
    assert (run.state, faults_found) == (State.SUCCEEDED, [])
    assert len(intents) == run.dispatches_spent <= run.dispatches_limit
    return run


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in memory: the death of a process asks nothing of the disk, and every commit there is quick."""
    memory = Path("/dev/shm")  # where there is one
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


# -- in this process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lives", [1, 2, 4])
async def test_an_engine_killed_before_any_statement_of_each_life_ends_with_one_ticket(shm: Path, lives: int) -> None:
    """K1: whichever statement the engine dies before, in one life or in several on end, nothing is lost or repeated."""
    kills = 0
    for k in itertools.count(1):
        folder = shm / str(k)
        ends = [await live(folder, engine=k) for _ in range(lives)]
        kills += sum(life.killed for life in ends)
        await finish(folder)
        assert kept(folder).dispatches_limit == 3 or lives > 2
        if not ends[0].killed:
            break
    assert k - 1 == ends[0].engine.count > 50
    assert kills == k - 1 if lives == 1 else kills > k


@pytest.mark.parametrize("lives", [1, 4])
async def test_a_server_killed_before_any_of_its_statements_ends_with_one_ticket(shm: Path, lives: int) -> None:
    """K2: whichever statement the server dies before, once or in each of its lives, nothing is lost or repeated."""
    kills = 0
    for k in itertools.count(1):
        folder = shm / str(k)
        ends = [await live(folder, server=k) for _ in range(lives)]
        kills += sum(life.server.count >= k for life in ends)
        assert not any(life.killed for life in ends)
        await finish(folder)
        kept(folder)
        if ends[0].server.count < k:
            break
    assert k - 1 == ends[0].server.count > 20
    assert kills == k - 1 if lives == 1 else kills > k


async def test_both_sides_killed_in_turn_end_with_one_ticket(shm: Path) -> None:
    """K1 and K2 together: the engine, then the server, then both die at every distance from their start."""
    engine_kills = server_kills = 0
    for k in range(1, 60, 2):
        folder = shm / str(k)
        for engine, server in ((k, 0), (0, k % 27 + 1), (60 - k, (k * 7) % 27 + 1), (0, (k * 11) % 27 + 1)):
            life = await live(folder, engine, server)
            engine_kills += life.killed
            server_kills += 0 < server <= life.server.count
        await finish(folder)
        kept(folder)
    assert engine_kills >= 30
    assert server_kills >= 20


async def test_a_model_budget_is_not_stretched_by_deaths(shm: Path) -> None:
    """A request is debited before it is sent, so deaths between debit and answer end at the budget, not beyond it."""
    asked = []

    async def one_life() -> State | None:
        runs = Runs(shm)
        run = await runs.open(RUN, CONTRACT)

        async def model(goal: Any) -> Any:
            asked.append(goal)
            raise Killed

        try:
            return (await drive(runs, run, Ports(model, Local(shm, mortal(0))), True)).state
        except Killed:
            return None
        finally:
            runs.close()

    ends = [await one_life() for _ in range(8)]
    assert len(asked) == CONTRACT.budget.model_requests == 5
    assert ends == [None] * 5 + [State.FAILED] * 3
    assert tickets(shm) == []


async def test_a_hundred_deaths_in_the_dispatch_window_buy_no_third_dispatch(shm: Path) -> None:
    """K11: a budget of two stands through a hundred killed commands; then a grant, with who and why, buys one more."""
    contract = replace(CONTRACT, budget=Budget(dispatches=2))
    deadly = [Deadly(shm, mortal(0)) for _ in range(100)]
    lives = [await live(shm, contract=contract, tool=lambda *_, tool=tool: tool) for tool in deadly]
    assert [life.killed for life in lives] == [True] * 2 + [False] * 98
    assert sum(tool.kills for tool in deadly) == 2
    assert {life.run.state for life in lives if life.run} == {State.RECONCILE_REQUIRED}
    assert tickets(shm) == []

    runs = Runs(shm)
    runs.request(RUN, GRANT, while_driven=False)
    runs.close()
    ended = await live(shm, contract=contract)
    assert ended.run
    assert ended.run.dispatches_spent == 3
    kept(shm)
    runs = Runs(shm)
    assert [e.detail for e in runs.events(RUN) if e.type is EventType.GRANTED] == [GRANT.detail]
    runs.close()


async def test_an_engine_that_dies_after_the_write_never_writes_again(shm: Path) -> None:
    """The write landed and its answer died with the engine: the look-up finds it and the first attempt was the last."""
    life = await live(shm, tool=lambda folder, watch: Deadly(folder, watch, after=True))
    assert life.killed
    assert (await finish(shm)).dispatches_spent == 1
    kept(shm)


# -- real processes ----------------------------------------------------------------------------------------------------


def _statements(text: str, side: str) -> int:
    """How many statements a side said that it executed."""
    found = re.findall(rf"^{side}: (\d+) statements$", text, re.M)
    assert len(found) == 1, text
    return int(found[0])


def _finish(folder: Path) -> None:
    """Go on from what the killed processes left, in this process: it reads the same files and starts no SDK."""
    asyncio.run(finish(folder))
    kept(folder)


def _killed(lab: Lab, sides: dict[str, int]) -> dict[str, int]:
    """Kill the sides, each in a life of the command, before its k-th statement; returns how often each was killed."""
    kills = dict.fromkeys(sides, 0)
    for side, k in sides.items():
        ended = lab.run(f"--{side}", f"kill@{k}", "--execute", program=(PROGRAM,))
        hit = f"{side}: kill before" in ended.stderr
        kills[side] += hit
        if side == "engine":
            assert (ended.returncode == -signal.SIGKILL) == hit
        elif hit:
            assert ended.returncode == 75
    return kills


@pytest.mark.parametrize("side", ["engine", "server"])
@pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.process)]
)
def test_a_process_killed_before_any_statement_ends_with_one_ticket(tmp_path: Path, side: str, stride: int) -> None:
    """K1, K2: SIGKILL before every statement (the slow ring) or every ninth of the real command or its real server."""
    whole = Lab(tmp_path / "whole").run(f"--{side}", "kill@0", "--execute", program=(PROGRAM,))
    statements = _statements(whole.stderr, side)
    assert statements > (50 if side == "engine" else 20)
    moments = [*range(1, statements + 1, stride), statements + 1]
    with ThreadPoolExecutor(2) as pool:
        kills = list(pool.map(lambda k: _killed(Lab(tmp_path / str(k)), {side: k})[side], moments))
    assert kills == [1] * (len(moments) - 1) + [0]
    for k in moments:
        _finish(tmp_path / str(k))
    print(f"{side}: {sum(kills)} kills before {statements} statements")


@pytest.mark.process
def test_processes_of_both_sides_killed_in_turn_end_with_one_ticket(lab: Lab) -> None:
    """K1 and K2 together, with real signals: engine, server, engine, server of one run."""
    late, early = _killed(lab, {"engine": 46, "server": 19}), _killed(lab, {"engine": 26, "server": 12})
    assert sum(late.values()) + sum(early.values()) >= 3
    assert all(late[side] + early[side] for side in late)
    _finish(lab.state_dir)


@pytest.mark.process
def test_a_process_killed_at_random_moments_ends_with_one_ticket(tmp_path: Path) -> None:
    """Five SIGKILLs and more from outside, at moments that no statement chooses, up to two for each run."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    assert Lab(tmp_path / "first").run().returncode == 0  # the first one waits for the imports of all
    began = monotonic()
    assert Lab(tmp_path / "whole").run("--execute").returncode == 0
    lifetime = monotonic() - began
    kills = number = 0
    while kills < 5 and number < 15:
        number += 1
        lab = Lab(tmp_path / str(number))
        for _ in range(2):
            process = lab.start("--execute")
            try:
                process.communicate(timeout=moments.uniform(0, lifetime))
            except TimeoutExpired:
                process.kill()
                process.communicate()
                kills += process.returncode == -signal.SIGKILL
        assert lab.run("--execute").returncode == 0
        kept(lab.state_dir)
    assert kills >= 5


@pytest.mark.process
def test_processes_that_die_after_their_intent_stop_at_the_budget(lab: Lab) -> None:
    """K11 with real processes: two intents, then every further command says that a person is needed."""
    fault = ("--execute", "--dispatches", "2", "--fault", faults.CLIENT_AFTER_INTENT)
    codes = [lab.run(*fault).returncode for _ in range(5)]
    assert codes == [faults.EXIT_CODE] * 2 + [3] * 3
    assert lab.tickets() == []
    assert lab.operate("grant", RUN, "--dispatches", "1", "--by", "ada", "--why", "looked myself").returncode == 0
    assert lab.json("--execute")["attempts"] == 3
    kept(lab.state_dir)


@pytest.mark.process
def test_a_killed_command_leaves_no_server_behind(lab: Lab) -> None:
    """The server dies with the command that started it, so no orphan writes while the next one looks."""
    command = [sys.executable, PROGRAM, "--state-dir", str(lab.state_dir), "--server", "hang@insert into tickets"]
    process = subprocess.Popen([*command, "--execute"], cwd=ROOT, stderr=subprocess.PIPE, text=True)  # as a user does
    assert process.stderr
    assert "server: hang" in process.stderr.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    server = os.pidfd_open(int(children[0]))
    process.kill()
    process.wait()
    dead, _, _ = select.select([server], [], [], 10)
    if not dead:
        signal.pidfd_send_signal(server, signal.SIGKILL)
    process.communicate()
    os.close(server)
    assert dead
    _finish(lab.state_dir)
