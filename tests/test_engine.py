"""The loop over real journals, with a scripted outside: what is on disk at each call, and what stops what."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miniharness import engine
from miniharness.contract import Budget, Contract, Tool
from miniharness.engine import Answer, Json, Ports, drive
from miniharness.errors import ModelUnavailable, ProposalRejected, StoreError, ToolUnavailable
from miniharness.machine import Event, EventType, Outcome, Run, State
from miniharness.report import report
from miniharness.runs import Runs

GOAL = {"text": "hello"}
NOW = 1_000.0


class World:
    """A tool whose every answer is scripted; `before` is called with the name of each call before it happens."""

    def __init__(self, *outcomes: Outcome, before: Callable[[str], None] = lambda name: None) -> None:
        self.outcomes = list(outcomes)
        self.before = before
        self.calls: list[str] = []
        self.effect: Json | None = None

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.before(name)

    async def connect(self) -> Json:
        self._called("connect")
        return {"protocol": "scripted"}

    async def look_up(self, key: str, epoch: int) -> Json | None:
        self._called("look_up")
        return self.effect

    async def dispatch(self, key: str, action: Json, epoch: int) -> Answer:
        self._called("dispatch")
        outcome = self.outcomes.pop(0)
        if outcome is Outcome.RETURNED:
            self.effect = {"id": 1, "action": dict(action)}
        return Answer(outcome, "because")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    journal = Runs(tmp_path / "state")
    yield journal
    journal.close()


def contract(**changes: Any) -> Contract:
    tool = Tool(name="write", resource="note", fences=True, deduplicates=True)
    fields = {"goal": GOAL, "tool": tool, "provider": "fixture", "model": "m", "command": "test"} | changes
    return Contract(**fields)


async def agree(goal: Json) -> tuple[Json, Json]:
    return goal, {"model": "m"}


async def go(runs: Runs, world: World, *, permit: bool = True, model: engine.Model = agree, **changes: Any) -> Run:
    run = await runs.open("r", contract(**changes))
    return await drive(runs, run, Ports(model, world), permit, now=lambda: NOW)


def kinds(runs: Runs) -> list[str]:
    return [event.type.value for event in runs.events("r")]


async def test_intent_and_debit_are_on_disk_before_the_write_leaves(runs: Runs) -> None:
    """Another connection sees `dispatching` and the spent unit at the moment of the dispatch."""
    seen: list[tuple[State, int]] = []

    def before(name: str) -> None:
        if name == "dispatch":
            other = Runs(runs.folder)
            row = other.require("r")
            seen.append((row.state, row.dispatches_spent))
            other.close()

    run = await go(runs, World(Outcome.RETURNED, before=before))
    assert seen == [(State.DISPATCHING, 1)]
    assert (run.state, runs.require("r")) == (State.SUCCEEDED, run)


async def test_the_model_request_is_debited_before_it_leaves(runs: Runs) -> None:
    """Another connection sees the spent request at the moment of asking."""
    seen = []

    async def model(goal: Json) -> tuple[Json, Json]:
        other = Runs(runs.folder)
        seen.append(other.require("r").model_requests_spent)
        other.close()
        return await agree(goal)

    await go(runs, World(), permit=False, model=model)
    assert seen == [1]


async def test_every_dispatch_has_a_look_up_before_and_after_it(runs: Runs) -> None:
    """The tool is connected once, and look-ups surround each dispatch, the failed ones too."""
    world = World(Outcome.UNKNOWN, Outcome.UNSENT, Outcome.RETURNED)
    run = await go(runs, world)
    assert world.calls == ["connect", "look_up", *["dispatch", "look_up"] * 3]
    assert (run.state, run.dispatches_spent) == (State.SUCCEEDED, 3)


async def test_a_refused_write_fails_with_the_tools_reason(runs: Runs) -> None:
    """A clean refusal and nothing there: `failed`, after one dispatch."""
    run = await go(runs, World(Outcome.REFUSED))
    assert (run.state, run.reason, run.dispatches_spent) == (State.FAILED, "the tool refused the write: because", 1)


async def test_a_failed_look_up_moves_nothing(runs: Runs) -> None:
    """When nobody knows, the run stays where it is and the error comes out."""

    def before(name: str) -> None:
        if name == "look_up":
            raise ToolUnavailable

    with pytest.raises(ToolUnavailable):
        await go(runs, World(before=before))
    assert (runs.require("r").state, kinds(runs)[-1]) == (State.PLANNED, "connected")


async def test_a_deadline_stops_new_requests_and_dispatches_but_never_a_look_up(runs: Runs) -> None:
    """After the deadline a lost write is still looked up, and found: `succeeded`."""
    world = World(Outcome.UNKNOWN)
    world.before = lambda name: setattr(world, "effect", {"id": 1, "action": GOAL}) if name == "dispatch" else None
    run = await runs.open("r", contract(deadline=NOW + 1))
    clock = iter([NOW] * 7 + [NOW + 2] * 9)
    run = await drive(runs, run, Ports(agree, world), True, now=lambda: next(clock))
    assert (run.state, world.calls[-1]) == (State.SUCCEEDED, "look_up")


async def test_past_its_deadline_a_new_run_asks_nobody(runs: Runs) -> None:
    """The deadline ends it as `failed`; neither model nor tool is called."""
    world = World()
    run = await go(runs, world, deadline=NOW - 1, model=lambda goal: pytest.fail("asked"))
    assert (run.state, run.model_requests_spent, world.calls) == (State.FAILED, 0, [])


async def test_past_its_deadline_a_planned_run_looks_up_and_writes_nothing(runs: Runs) -> None:
    """It is looked up once more, and fails with the deadline as its reason."""
    run = await runs.open("r", contract(deadline=NOW))
    world = World()
    await drive(runs, run, Ports(agree, world), False, now=lambda: NOW - 1)
    run = await drive(runs, await runs.open("r", contract(deadline=NOW)), Ports(agree, world), True, now=lambda: NOW)
    assert (run.state, run.reason) == (State.FAILED, "the deadline passed before the write")
    assert "dispatch" not in world.calls


async def test_an_unavailable_model_is_recorded_and_can_be_asked_again(runs: Runs) -> None:
    """The request stays debited, the state stays `new`, and the next opening asks again."""

    async def fail(goal: Json) -> tuple[Json, Json]:
        raise ModelUnavailable("the provider is overloaded")

    with pytest.raises(ModelUnavailable):
        await go(runs, World(), model=fail)
    stored = runs.require("r")
    assert (stored.state, stored.model_requests_spent, kinds(runs)[-1]) == (State.NEW, 1, "model_failed")
    assert (await go(runs, World(Outcome.RETURNED))).state is State.SUCCEEDED


async def test_a_model_that_never_answers_is_given_up(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds although the model's own thread goes on."""
    monkeypatch.setattr(engine, "MODEL_TIMEOUT_S", 0.05)
    with pytest.raises(ModelUnavailable, match="did not answer within"):
        await go(runs, World(), model=lambda goal: engine.in_a_thread(time.sleep, 1))


async def test_the_model_budget_has_a_definite_end(runs: Runs) -> None:
    """When the last request is spent without a proposal, the run fails and names the budget."""

    async def fail(goal: Json) -> tuple[Json, Json]:
        raise ModelUnavailable

    for _ in range(2):
        with pytest.raises(ModelUnavailable):
            await go(runs, World(), model=fail, budget=Budget(model_requests=2))
    run = await go(runs, World(), model=lambda goal: pytest.fail("asked"), budget=Budget(model_requests=2))
    assert (run.state, "budget is spent (2 of 2)" in run.reason) == (State.FAILED, True)


@pytest.mark.parametrize("proposal", [{"text": "other"}, {"text": "hello", "more": 1}, {}])
async def test_a_proposal_that_is_not_the_goal_calls_no_tool(runs: Runs, proposal: Json) -> None:
    """Structure is not truth: the run fails before any tool is called."""
    world = World()

    async def propose(goal: Json) -> tuple[Json, Json]:
        return proposal, {}

    run = await go(runs, world, model=propose)
    assert (run.state, world.calls) == (State.FAILED, [])


async def test_a_rejected_answer_is_final(runs: Runs) -> None:
    """A refused answer fails the run with its reason and calls no tool."""

    async def reject(goal: Json) -> tuple[Json, Json]:
        raise ProposalRejected("two calls")

    world = World()
    run = await go(runs, world, model=reject)
    assert (run.state, run.reason, world.calls) == (State.FAILED, "the model's answer was refused: two calls", [])


async def test_a_cancel_that_arrives_before_the_intent_stops_it(runs: Runs) -> None:
    """The request lands between the look-up and the intent: no dispatch, one more look-up, `cancelled`."""
    other = Runs(runs.folder)
    asked: list[str] = []

    def before(name: str) -> None:
        if name == "look_up" and not asked:
            asked.append(name)
            other.request("r", Event(EventType.CANCEL_REQUESTED), while_driven=True)

    world = World(before=before)
    run = await go(runs, world)
    other.close()
    assert (run.state, "dispatch" in world.calls) == (State.CANCELLED, False)


async def test_a_liar_spends_the_budget_and_ends_with_a_person(runs: Runs) -> None:
    """A tool that says it wrote and did not is never believed: `reconcile_required` after the last dispatch."""
    world = World()
    world.dispatch = lambda *_: lie(world)  # type: ignore[method-assign, assignment]

    async def lie(tool: World) -> Answer:
        tool.calls.append("dispatch")
        return Answer(Outcome.RETURNED)

    run = await go(runs, world)
    assert (run.state, run.dispatches_spent, world.calls.count("dispatch")) == (State.RECONCILE_REQUIRED, 3, 3)


def test_a_report_without_its_whole_history_is_refused(tmp_path: Path) -> None:
    """A row whose events are gone is damage, not a short history."""
    runs = Runs(tmp_path)
    asyncio.run(runs.open("r", contract()))
    with sqlite3.connect(tmp_path / "runs.sqlite") as file:
        file.execute("delete from events")
    file.close()
    with pytest.raises(StoreError, match="1 events are missing"):
        report(runs, "r")
    runs.close()


async def test_a_stored_contract_that_breaks_its_own_rules_is_damage(tmp_path: Path) -> None:
    """What no command could have written is not told as a wrong command, nor as a traceback."""
    runs = Runs(tmp_path)
    await runs.open("r", contract())
    with sqlite3.connect(tmp_path / "runs.sqlite") as file:
        file.execute("update runs set contract = replace(contract, '\"dispatches\":3', '\"dispatches\":0')")
    file.close()
    with pytest.raises(StoreError, match="damaged"):
        runs.get("r")
    runs.close()


@pytest.mark.parametrize(
    "change",
    ["update events set detail = '{}' where seq = 2", "update runs set head = 'x'", "delete from events where seq = 2"],
)
async def test_a_history_that_was_not_written_so_is_never_told(runs: Runs, change: str) -> None:
    """The report checks the chain that it tells; the same fault is what `replay` finds."""
    run = await runs.open("r", contract())
    for _ in range(2):
        run = await runs.record(run, Event(EventType.CONNECTED, {"server": "s"}))
    with sqlite3.connect(runs.folder / "runs.sqlite") as file:
        file.execute(change)
    file.close()
    (fault, *_) = runs.replay(run.id)
    with pytest.raises(StoreError, match=re.escape(fault)):
        report(runs, run.id)
