"""The journal: who may move a run, what a move leaves on disk, and what a replay of the history finds out."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from conftest import GOAL, tickets
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from miniharness.contract import Budget, Contract, Tool
from miniharness.engine import Answer, Ports, drive
from miniharness.errors import ContractMismatch, Fenced, IllegalMove, RunBusy, UsageError
from miniharness.machine import (
    FINAL,
    AskModel,
    Decide,
    Dispatch,
    Event,
    EventType,
    LookUp,
    Outcome,
    Run,
    State,
    Step,
    next_step,
)
from store import Runs, Tickets

RUN = "review-001"
FIXTURES = Path(__file__).with_name("fixtures")
CONTRACT = Contract(
    goal=GOAL,
    tool=Tool(name="create_review_ticket", resource="ticket", fences=True, deduplicates=False),
    provider="fixture",
    model="scripted-1",
    command="python lab.py",
)
CANCEL = Event(EventType.CANCEL_REQUESTED)
GRANT = Event(EventType.GRANTED, {"dispatches": 1, "by": "ada", "why": "looked myself"})
ABSENT = {"key": f"{RUN}:ticket", "found": None}
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None


def done(work: Coroutine[Any, Any, Run]) -> Run:
    """The result of a coroutine, in a test that is none."""
    return asyncio.run(work)


@dataclass
class World:
    """The tool's side, remembered here: the rows, the fence, and the requests that are still on their way."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    fence: int = 0
    late: list[Dispatch] = field(default_factory=list)

    async def connect(self) -> dict[str, Any]:
        return {}

    async def look_up(self, key: str, epoch: int) -> dict[str, Any] | None:
        self.fence = max(self.fence, epoch)
        return self.rows[0] if self.rows else None

    async def dispatch(self, key: str, action: Any, epoch: int) -> Answer:
        return Answer(Outcome.RETURNED if self.land(Dispatch(key, epoch, action)) else Outcome.REFUSED, "too late")

    def land(self, request: Dispatch) -> bool:
        if request.epoch >= self.fence:
            self.rows.append({"id": len(self.rows) + 1, "action": dict(request.action)})
        return request.epoch >= self.fence


async def model(goal: Any) -> tuple[Any, Any]:
    return dict(goal), {}


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(dir=MEMORY) as made:
        yield Path(made)


@pytest.fixture
def journals(folder: Path) -> Iterator[Callable[..., Runs]]:
    """Opens the journal as one more process would; each is closed at the end."""
    opened: list[Runs] = []

    def journal(**options: Any) -> Runs:
        opened.append(Runs(folder, **options))
        return opened[-1]

    yield journal
    for runs in opened:
        runs.close()


@pytest.fixture
def runs(journals: Callable[..., Runs]) -> Runs:
    return journals()


def rows(runs: Runs) -> list[tuple[Any, ...]]:
    """Every row of both tables, read from the file itself."""
    with closing(sqlite3.connect(runs.folder / "runs.sqlite")) as file:
        return [*file.execute("select * from runs"), *file.execute("select * from events")]


def walked(runs: Runs, run: Run, *steps: EventType) -> Run:
    """The run after these events, each with a detail that fits."""
    for kind in steps:
        detail = {
            EventType.PROPOSED: {"proposal": GOAL, "metadata": {}},
            EventType.LOOKED_UP: ABSENT,
            EventType.DISPATCH_ANSWERED: {"outcome": "unknown", "message": ""},
        }.get(kind, {})
        run = done(runs.record(run, Event(kind, detail)))
    return run


TO_PLANNED = (EventType.MODEL_REQUESTED, EventType.PROPOSED)
TO_RECONCILING = (*TO_PLANNED, EventType.LOOKED_UP)
TO_DISPATCHING = (*TO_RECONCILING, EventType.DISPATCH_INTENDED)


# -- opening and claiming ----------------------------------------------------------------------------------------------


def test_opening_puts_the_run_on_disk_with_its_owner_in_epoch_one(runs: Runs, journals: Callable[..., Runs]) -> None:
    """What `open` returns is what another process reads, history included."""
    run = done(runs.open(RUN, CONTRACT))
    assert (run.state, run.version, run.epoch) == (State.NEW, 1, 1)
    assert run.owner.startswith(f"{os.getpid()}-")
    other = journals()
    assert other.get(RUN) == run
    assert [e.type for e in other.events(RUN)] == [EventType.OPENED]
    assert runs.replay(RUN) == []


def test_a_dead_owners_run_is_claimed_at_once_in_a_new_epoch(runs: Runs, journals: Callable[..., Runs]) -> None:
    """There is no lease to wait out: a free lock is a dead owner."""
    old = done(runs.open(RUN, CONTRACT))
    runs.close()
    run = done(journals().open(RUN, CONTRACT))
    assert (run.version, run.epoch) == (2, old.epoch + 1)
    assert run.owner != old.owner


def test_a_living_owners_run_is_refused_with_its_pid_and_nothing_changes(
    runs: Runs, journals: Callable[..., Runs]
) -> None:
    """Who lives keeps the run; the refusal names the process and writes nothing."""
    done(runs.open(RUN, CONTRACT))
    before = rows(runs)
    with pytest.raises(RunBusy, match=f"process {os.getpid()},"):
        done(journals().open(RUN, CONTRACT))
    with pytest.raises(RunBusy, match=f"process {os.getpid()},"):
        done(runs.open(RUN, CONTRACT))
    assert rows(runs) == before


def test_a_taken_over_owner_is_fenced_by_its_next_record(runs: Runs, journals: Callable[..., Runs]) -> None:
    """A forced claim stands in the history, and the old owner learns of it before it writes anything."""
    old = done(runs.open(RUN, CONTRACT))
    new = journals()
    run = done(new.open(RUN, CONTRACT, take_over=True))
    assert new.events(RUN)[-1].detail == {"owner": run.owner, "forced": True}
    before = rows(runs)
    with pytest.raises(Fenced, match="taken over"):
        done(runs.record(old, Event(EventType.MODEL_REQUESTED, {"request": 1})))
    assert rows(runs) == before
    walked(new, run, *TO_DISPATCHING)
    assert new.replay(RUN) == []


def test_a_finished_run_is_only_read(runs: Runs, journals: Callable[..., Runs]) -> None:
    """Opening what has ended writes nothing, even when asked to take it over."""
    run = done(runs.open(RUN, CONTRACT))
    ended = done(runs.record(walked(runs, run, *TO_PLANNED), CANCEL))
    ended = walked(runs, ended, EventType.LOOKED_UP)
    before = rows(runs)
    assert ended.state is State.CANCELLED
    assert done(journals().open(RUN, CONTRACT, take_over=True)) == ended
    assert rows(runs) == before


DIFFERENT = {
    "goal.title": {"goal": GOAL | {"title": "another"}},
    "provider": {"provider": "anthropic"},
    "model": {"model": "claude-opus-5-5"},
    "budget.dispatches": {"budget": Budget(dispatches=9)},
    "budget.model_requests": {"budget": Budget(model_requests=9)},
    "deadline": {"deadline": 2e9},
    "tool.fences": {"tool": replace(CONTRACT.tool, fences=False)},
}


@pytest.mark.parametrize("finished", [False, True], ids=["living", "finished"])
@pytest.mark.parametrize(
    "fields", [*((name,) for name in DIFFERENT), ("goal.title", "model", "deadline")], ids=",".join
)
def test_another_contract_is_refused_with_each_field_named(
    runs: Runs, journals: Callable[..., Runs], fields: tuple[str, ...], finished: bool
) -> None:
    """K14: the same id with another contract changes nothing and says what differs, and only that."""
    run = done(runs.open(RUN, CONTRACT))
    if finished:
        walked(runs, done(runs.record(run, CANCEL)), EventType.LOOKED_UP)
    before = rows(runs)
    other = CONTRACT
    for name in fields:
        other = replace(other, **DIFFERENT[name])
    with pytest.raises(ContractMismatch) as refused:
        done(journals().open(RUN, other, take_over=True))
    assert {name for name in CONTRACT.fields() if f"{name} is " in str(refused.value)} == set(fields)
    assert rows(runs) == before


@pytest.mark.parametrize("name", ["", "x" * 500, "../x", "a\nb", "a'b", "a/b", "核验", "-x", ".x"])
def test_a_run_id_that_breaks_the_rule_is_refused_with_the_rule(runs: Runs, name: str) -> None:
    """K21: one stated rule for run ids, and no row for what breaks it."""
    with pytest.raises(UsageError, match="1 to 64 of A-Z a-z 0-9"):
        done(runs.open(name, CONTRACT))
    assert rows(runs) == []


# -- recording ---------------------------------------------------------------------------------------------------------


def test_a_record_is_event_state_and_debit_in_one_commit(runs: Runs, journals: Callable[..., Runs]) -> None:
    """When `record` returns, another process sees the state, the debit and the event together."""
    run = walked(runs, done(runs.open(RUN, CONTRACT)), *TO_DISPATCHING)
    other = journals()
    assert other.get(RUN) == run
    assert (run.state, run.dispatches_spent) == (State.DISPATCHING, 1)
    assert other.events(RUN)[-1].type is EventType.DISPATCH_INTENDED
    assert run.version == len(other.events(RUN))


@pytest.mark.parametrize("kind", [EventType.DISPATCH_INTENDED, EventType.SETTLED, EventType.DISPATCH_ANSWERED])
def test_an_event_that_the_state_does_not_allow_changes_nothing(runs: Runs, kind: EventType) -> None:
    """A refused move leaves every row of both tables as it was, and the run can go on."""
    run = done(runs.open(RUN, CONTRACT))
    before = rows(runs)
    with pytest.raises(IllegalMove):
        done(runs.record(run, Event(kind, {"as": "failed"})))
    assert rows(runs) == before
    walked(runs, run, *TO_PLANNED)


def test_a_budget_cannot_be_overdrawn_even_past_the_machine(runs: Runs) -> None:
    """The file itself refuses a debit beyond the limit."""
    done(runs.open(RUN, CONTRACT))
    with (
        closing(sqlite3.connect(runs.folder / "runs.sqlite")) as file,
        pytest.raises(sqlite3.IntegrityError, match="dispatches_spent"),
    ):
        file.execute("update runs set dispatches_spent = dispatches_limit + 1")


def test_a_cancel_between_two_records_is_seen_before_the_intent(runs: Runs, journals: Callable[..., Runs]) -> None:
    """An intent that an operator's cancel overtook is dropped, not written; the row comes back for another look."""
    run = walked(runs, done(runs.open(RUN, CONTRACT)), *TO_RECONCILING)
    journals().request(RUN, CANCEL, while_driven=True)
    after = done(runs.record(run, Event(EventType.DISPATCH_INTENDED, {})))
    assert (after.cancel, after.dispatches_spent, after.version) == (True, 0, run.version + 1)
    assert isinstance(next_step(after, True, 0), LookUp)
    assert walked(runs, after, EventType.LOOKED_UP).state is State.CANCELLED
    assert runs.replay(RUN) == []


def test_an_answer_that_a_cancel_overtook_is_kept(runs: Runs, journals: Callable[..., Runs]) -> None:
    """What the outside said is never lost to an operator's event: it is applied to the row as it now stands."""
    run = walked(runs, done(runs.open(RUN, CONTRACT)), *TO_DISPATCHING)
    journals().request(RUN, CANCEL, while_driven=True)
    after = walked(runs, run, EventType.DISPATCH_ANSWERED)
    assert (after.state, after.cancel, after.version) == (State.RECONCILING, True, run.version + 2)
    found = {"key": run.key, "found": {"id": 1, "action": GOAL}}
    assert done(runs.record(after, Event(EventType.LOOKED_UP, found))).state is State.SUCCEEDED
    assert runs.replay(RUN) == []


@pytest.mark.parametrize("at", range(7))
async def test_a_cancel_during_a_drive_ends_in_a_verdict_or_in_cancelled(
    runs: Runs, journals: Callable[..., Runs], at: int
) -> None:
    """Whichever record a cancel comes before: nothing there means cancelled, a landed write means succeeded."""
    operator, world, ports = journals(), World(), None

    class Meddled(Ports):
        count = 0

        async def perform(self, step: Step) -> Event:
            event = await super().perform(step)
            if self.count == at:
                operator.request(RUN, CANCEL, while_driven=True)
            self.count += 1
            return event

    ports = Meddled(model, world)
    run = await drive(runs, await runs.open(RUN, CONTRACT), ports, permit=True)
    assert ports.count > at
    assert run.state is (State.SUCCEEDED if world.rows else State.CANCELLED)
    assert len(world.rows) == run.dispatches_spent <= 1
    assert runs.replay(RUN) == []


def test_a_grant_and_a_settlement_are_recorded_with_who_and_why(runs: Runs) -> None:
    """An operator's word is an event; a settled run says for ever that no check confirmed it."""
    contract = replace(CONTRACT, budget=Budget(dispatches=1))
    run = walked(
        runs, done(runs.open(RUN, contract)), *TO_DISPATCHING, EventType.DISPATCH_ANSWERED, EventType.LOOKED_UP
    )
    assert run.state is State.RECONCILE_REQUIRED
    settle = Event(EventType.SETTLED, {"as": "failed", "by": "ada", "why": "not wanted"})
    with pytest.raises(RunBusy):
        runs.request(RUN, settle, while_driven=False)
    runs.leave(run)
    assert runs.request(RUN, GRANT, while_driven=False).dispatches_limit == 2
    assert runs.request(RUN, settle, while_driven=False).settled_by == "ada"
    assert [e.detail for e in runs.events(RUN)[-2:]] == [GRANT.detail, settle.detail]
    with pytest.raises(IllegalMove):
        runs.request(RUN, GRANT, while_driven=False)
    with pytest.raises(UsageError, match="no run 'other'"):
        runs.request("other", GRANT, while_driven=False)
    assert runs.replay(RUN) == []


async def test_a_clock_that_jumps_back_changes_no_order_and_repeats_nothing(journals: Callable[..., Runs]) -> None:
    """K22: events are ordered by their number; a clock an hour earlier at each record is only what it shows."""
    hours = itertools.count(500, -1)
    runs, world = journals(clock=lambda: next(hours) * 3600.0), World()
    run = await drive(runs, await runs.open(RUN, CONTRACT), Ports(model, world), permit=True)
    history = runs.events(RUN)
    assert run.state is State.SUCCEEDED
    assert len(world.rows) == 1
    assert [e.seq for e in history] == list(range(1, run.version + 1))
    assert [e.at for e in history] == sorted((e.at for e in history), reverse=True)
    assert runs.replay(RUN) == []


# -- proving -----------------------------------------------------------------------------------------------------------


TAMPERING = {
    "an altered detail": ("update events set detail = replace(detail, 'source-001', 'source-002')", "was altered"),
    "another time": ("update events set at = at + 1 where seq = 3", "event 3 .* was altered"),
    "another event type": ("update events set type = 'connected' where seq = 5", "event 5 .* was altered"),
    "a deleted event": ("delete from events where seq = 4", "event 4 is missing"),
    "a deleted last event": ("delete from events where seq = (select max(seq) from events)", "column version is"),
    "a deleted history": ("delete from events", "no events"),
    "swapped events": (
        "update events set seq = -seq where seq in (4, 5); update events set seq = 9 + seq where seq < 0",
        "event 4 .* was altered",
    ),
    "another state": ("update runs set state = 'cancelled'", "column state is .*cancelled"),
    "a refilled budget": ("update runs set dispatches_spent = 0", "column dispatches_spent is 0"),
    "a higher limit": ("update runs set dispatches_limit = 9", "column dispatches_limit is 9"),
    "another resource": ("update runs set resource = replace(resource, 'source-001', 'x')", "column resource is"),
    "another owner": ("update runs set owner = '1-x'", "column owner is '1-x'"),
    "another head": ("update runs set head = 'x'", "column head is 'x'"),
    "another contract": ("update runs set contract = replace(contract, 'scripted-1', 'x')", "column contract is"),
}


@pytest.mark.parametrize("what", TAMPERING)
async def test_a_replay_finds_what_was_tampered_with(runs: Runs, what: str) -> None:
    """Whatever one changes in the row or in the history, the fold or the chain of digests tells."""
    await drive(runs, await runs.open(RUN, CONTRACT), Ports(model, World()), permit=True)
    assert runs.replay(RUN) == []
    before, (sql, fault) = rows(runs), TAMPERING[what]
    with closing(sqlite3.connect(runs.folder / "runs.sqlite")) as file:
        file.executescript(sql)
    assert rows(runs) != before
    assert re.search(fault, "\n".join(runs.replay(RUN)))


def test_a_replay_does_not_touch_the_file(runs: Runs) -> None:
    """Proving is reading."""
    walked(runs, done(runs.open(RUN, CONTRACT)), *TO_DISPATCHING)
    before = rows(runs)
    assert runs.replay(RUN) == []
    assert rows(runs) == before


# -- cost --------------------------------------------------------------------------------------------------------------


def _fill(runs: Runs, count: int) -> None:
    """Copy the one finished run and its history until there are `count`."""
    columns = [f for f in Run.__dataclass_fields__ if f != "id"]
    with closing(sqlite3.connect(runs.folder / "runs.sqlite")) as file:
        numbers = "with recursive c (i) as (select 2 union all select i + 1 from c where i < ?) select i from c"
        file.execute(f"create temp table n as {numbers}", (count,))
        listed = ", ".join(columns)
        file.execute(f"insert into runs (id, {listed}) select 'run-' || i, {listed} from n, runs where id = 'run-1'")
        file.execute("insert into events select 'run-' || i, seq, at, epoch, type, detail, digest from n, events")
        file.commit()


async def _whole_run(runs: Runs, run_id: str) -> Run:
    return await drive(runs, await runs.open(run_id, CONTRACT), Ports(model, World()), permit=True)


async def _cost(folder: Path, stored: int, patch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """The steps of SQLite's machine, and the statements, for one run among `stored` finished ones."""
    filling = Runs(folder)
    await _whole_run(filling, "run-1")
    _fill(filling, stored)
    filling.close()
    steps, statements, connect = itertools.count(), [], sqlite3.connect

    def counted(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.set_progress_handler(lambda: next(steps) < 0, 1)
        connection.set_trace_callback(statements.append)
        return connection

    patch.setattr(sqlite3, "connect", counted)
    runs = Runs(folder)
    patch.undo()
    run = await _whole_run(runs, RUN)
    assert (run.state, runs.replay(RUN)) == (State.SUCCEEDED, [])
    assert len(list(runs.all(State.NEW))) == 0
    runs.close()
    return next(steps), statements


async def test_a_run_among_ten_thousand_costs_what_it_costs_among_ten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K23: the same statements and as many steps inside SQLite, and no statement scans a table."""
    few, statements = await _cost(tmp_path / "few", 10, monkeypatch)
    many, same = await _cost(tmp_path / "many", 10_000, monkeypatch)
    assert len(statements) == len(same) >= 50
    assert many <= few * 1.1
    hot = [sql for sql in statements if sql.split()[0] in ("select", "update", "insert") and "sqlite_schema" not in sql]
    assert len(hot) > 20
    with closing(sqlite3.connect(tmp_path / "many" / "runs.sqlite")) as file:
        plans = [row[3] for sql in hot for row in file.execute(f"explain query plan {sql}")]
    assert len(plans) > 10
    assert [plan for plan in plans if not plan.startswith("SEARCH")] == []


# -- two at once -------------------------------------------------------------------------------------------------------


async def test_of_two_tasks_that_start_one_run_one_drives(runs: Runs) -> None:
    """K12 in one process: the second task is refused while the first drives, and there is one write."""
    world = World()
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Ports):
        async def perform(self, step: Step) -> Event:
            begun.set()
            await go_on.wait()
            return await super().perform(step)

    async def start() -> Run:
        return await drive(runs, await runs.open(RUN, CONTRACT), Slow(model, world), permit=True)

    first, second = asyncio.create_task(start()), asyncio.create_task(start())
    await begun.wait()
    with pytest.raises(RunBusy):
        await second
    go_on.set()
    assert (await first).state is State.SUCCEEDED
    assert len(world.rows) == 1
    assert (await start()).version == (await first).version


async def test_a_run_that_a_task_left_can_be_taken_up_by_the_same_process(runs: Runs) -> None:
    """A drive that was interrupted leaves the run; the same process claims it again in a new epoch."""

    class Interrupted(Ports):
        async def perform(self, step: Step) -> Event:
            if isinstance(step, Dispatch):
                raise asyncio.CancelledError
            return await super().perform(step)

    world = World()
    with pytest.raises(asyncio.CancelledError):
        await drive(runs, await runs.open(RUN, CONTRACT), Interrupted(model, world), permit=True)
    run = await _whole_run(runs, RUN)
    assert (run.state, run.dispatches_spent) == (State.SUCCEEDED, 2)
    assert runs.replay(RUN) == []


# -- files of earlier versions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_earlier_versions_open_replay_and_keep_their_rows(tmp_path: Path, version: int) -> None:
    """A journal and a ticket file written by an older schema are read, proven and left finished by the present code."""
    shutil.copy(FIXTURES / f"runs-{version}.sqlite", tmp_path / "runs.sqlite")
    shutil.copy(FIXTURES / "tickets-1.sqlite", tmp_path / "tickets.sqlite")
    runs = Runs(tmp_path)
    run = runs.require(RUN)
    assert (run.state, run.dispatches_spent, run.contract.goal) == (State.SUCCEEDED, 1, GOAL)
    assert runs.replay(RUN) == []
    assert done(runs.open(RUN, run.contract)) == run
    runs.close()
    store = Tickets(tmp_path / "tickets.sqlite")
    ticket = store.look_up(f"{RUN}:ticket")
    store.close()
    assert ticket
    assert ticket.model_dump() == run.resource
    assert tickets(tmp_path) == [(f"{RUN}:ticket", GOAL)]


# -- everything at once ------------------------------------------------------------------------------------------------


FATES = ("lands", "lost", "late", "unsent", "answer lost")


class Journal(RuleBasedStateMachine):
    """Two processes, an operator and a world that loses, delays and refuses, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = TemporaryDirectory(dir=MEMORY)
        self.folder = Path(self._scratch.name)
        self.operator = Runs(self.folder)
        self.alive: dict[int, Runs] = {}
        self.held: dict[int, Run] = {}
        self.world = World()

    def teardown(self) -> None:
        for runs in (self.operator, *self.alive.values()):
            runs.close()
        self._scratch.cleanup()

    @rule(who=st.integers(0, 1), force=st.booleans())
    def open(self, who: int, force: bool) -> None:
        runs = self.alive.setdefault(who, Runs(self.folder)) if who not in self.alive else self.alive[who]
        stored = self.operator.get(RUN)
        owners = [n for n, other in self.alive.items() if stored and other.driven_elsewhere(stored)]
        busy = stored is not None and stored.state not in FINAL and (who in self.held or who in owners)
        try:
            run = done(runs.open(RUN, CONTRACT, force))
        except RunBusy:
            assert busy
            assert not force
            return
        assert force or not busy
        if run.state not in FINAL:
            assert run.epoch == (stored.epoch + 1 if stored else 1)
            self.held[who] = run

    @precondition(lambda self: self.held)
    @rule(data=st.data(), permit=st.booleans())
    def step(self, data: st.DataObject, permit: bool) -> None:
        who = data.draw(st.sampled_from(sorted(self.held)))
        run, runs = self.held[who], self.alive[who]
        todo = next_step(run, permit, 0)
        if todo.halts:
            runs.leave(run)
            del self.held[who]
            return
        event = self._perform(todo, data)
        stored = self.operator.require(RUN)
        try:
            self.held[who] = done(runs.record(run, event))
        except Fenced:
            assert stored.epoch != run.epoch
            assert self.operator.require(RUN) == stored
            runs.leave(run)
            del self.held[who]
            return
        assert stored.epoch == run.epoch
        assert self.held[who] == self.operator.get(RUN)

    def _perform(self, todo: Step, data: st.DataObject) -> Event:
        match todo:
            case Decide(event):
                return event
            case AskModel(goal):
                answers = [
                    Event(EventType.PROPOSED, {"proposal": dict(goal), "metadata": {}}),
                    Event(EventType.MODEL_FAILED, {"message": "try later"}),
                    Event(EventType.PROPOSAL_REJECTED, {"reason": "text only"}),
                ]
                return data.draw(st.sampled_from([answers[0], answers[0], *answers]))
            case LookUp(key, epoch):
                self.world.fence = max(self.world.fence, epoch)
                found = self.world.rows[0] if self.world.rows else None
                return Event(EventType.LOOKED_UP, {"key": key, "found": found})
            case Dispatch():
                return self._dispatch(todo, data.draw(st.sampled_from(FATES)))
            case _:
                raise AssertionError(todo)

    def _dispatch(self, request: Dispatch, fate: str) -> Event:
        outcome = Outcome.UNKNOWN
        if fate in ("lands", "answer lost"):
            landed = self.world.land(request)
            outcome = outcome if fate == "answer lost" else Outcome.RETURNED if landed else Outcome.REFUSED
        elif fate == "late":
            self.world.late.append(request)
        elif fate == "unsent":
            outcome = Outcome.UNSENT
        return Event(EventType.DISPATCH_ANSWERED, {"outcome": outcome, "message": "too late"})

    @precondition(lambda self: self.world.late)
    @rule()
    def a_late_request_arrives(self) -> None:
        self.world.land(self.world.late.pop(0))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.pop(who).close()
        self.held.pop(who, None)

    @rule(event=st.sampled_from([CANCEL, GRANT, GRANT]))
    def request(self, event: Event) -> None:
        stored = self.operator.get(RUN)
        allowed = stored is not None and stored.state not in FINAL
        try:
            self.operator.request(RUN, event, while_driven=True)
        except (IllegalMove, UsageError):
            assert not allowed
            assert self.operator.get(RUN) == stored

    @invariant()
    def the_history_gives_the_row(self) -> None:
        if run := self.operator.get(RUN):
            history = self.operator.events(RUN)
            intents = [e for e in history if e.type is EventType.DISPATCH_INTENDED]
            assert self.operator.replay(RUN) == []
            assert run.version == len(history)
            assert len(intents) == run.dispatches_spent <= run.dispatches_limit
            assert run.model_requests_spent <= run.contract.budget.model_requests

    @invariant()
    def the_promise_holds(self) -> None:
        assert len(self.world.rows) <= 1
        if run := self.operator.get(RUN):
            if run.state is State.SUCCEEDED:
                assert [row["action"] for row in self.world.rows] == [GOAL]
            elif run.state in FINAL:
                assert self.world.rows == []


TestJournal = Journal.TestCase
TestJournal.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
