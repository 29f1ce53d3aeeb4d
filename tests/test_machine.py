"""The machine alone: what each state allows, what comes next, and what becomes of a run; and its page in the docs.

`python tests/test_machine.py` writes the table in docs/machine.md anew.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as pytest has it, for the command above

from miniharness import machine
from miniharness.contract import Budget, Contract, Tool, canonical, digest
from miniharness.errors import IllegalMove
from miniharness.machine import (
    FINAL,
    AskModel,
    Decide,
    Dispatch,
    Event,
    EventType,
    Halt,
    LookUp,
    Outcome,
    Run,
    State,
    Step,
    allows,
    evolve,
    next_step,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "machine.md"
E, S = EventType, State
GOAL = {"source": "source-001", "title": "a title"}
OTHER = {**GOAL, "title": "another"}
EPOCH, DEADLINE = 3, 100.0
BUDGET = Budget(dispatches=2, model_requests=2)
QUESTION = {"digest": "d", "expires_at": 50.0, "by": None}
RESOURCE = {"id": 7, "action": GOAL}
DETAILS: dict[EventType, dict[str, Any]] = {
    E.OPENED: {"contract": {}, "owner": "1-a"},
    E.CLAIMED: {"owner": "2-b", "forced": False},
    E.CONNECTED: {"server": "s"},
    E.MODEL_REQUESTED: {"request": 1},
    E.MODEL_FAILED: {"message": "529"},
    E.PROPOSED: {"proposal": GOAL, "metadata": {}},
    E.PROPOSAL_REJECTED: {"reason": "two calls"},
    E.LOOKED_UP: {"key": "r:ticket", "found": None},
    E.DISPATCH_INTENDED: {"attempt": 1, "key": "r:ticket", "action_sha256": ""},
    E.DISPATCH_ANSWERED: {"outcome": "returned", "message": ""},
    E.APPROVAL_ASKED: {"digest": "d", "expires_at": 50.0},
    E.APPROVED: {"digest": "d", "by": "ann"},
    E.APPROVAL_VOIDED: {"why": "the rules changed"},
    E.GRANTED: {"dispatches": 1, "by": "ann", "why": "asked"},
    E.SETTLED: {"as": "failed", "by": "ann", "why": "looked"},
}


def contract(*, fences: bool = True, deduplicates: bool = True, deadline: float | None = DEADLINE) -> Contract:
    """A contract that differs from the others only in what the tests vary."""
    tool = Tool(name="write", resource="ticket", fences=fences, deduplicates=deduplicates)
    values = {"goal": GOAL, "tool": tool, "provider": "fixture", "model": "m", "budget": BUDGET}
    return Contract(**values, deadline=deadline, command="python lab.py")


CONTRACT = contract()


def a_run(state: State, **values: Any) -> Run:
    """A run in that state and in epoch 3, with nothing fresh."""
    proposal = None if state is S.NEW else GOAL
    values = {"contract": CONTRACT, "epoch": EPOCH, "version": 9, "dispatches_limit": 2, "proposal": proposal} | values
    return Run(id="r", state=state, **values)


def event(kind: EventType, **detail: Any) -> Event:
    """An event with a detail that fits its type."""
    return Event(kind, DETAILS.get(kind, {}) | detail)


def refuses(run: Run, happened: Event) -> None:
    """Assert that the move is refused, by both functions, and changes nothing."""
    before = deepcopy(run)
    assert not allows(run, happened)
    with pytest.raises(IllegalMove, match=rf"{happened.type} is not possible for run r, which is {run.state}"):
        evolve(run, happened)
    assert run == before


ALWAYS = {"claimed", "connected", "looked_up", "cancel_requested", "granted", "approval_voided"}
APPROVALS = {"approval_asked", "approved"}
MODEL = {"model_requested", "model_failed", "proposed", "proposal_rejected", "model_budget_spent"}
EXPECTED = {
    S.NEW: ALWAYS | MODEL | {"deadline_passed"},
    S.PLANNED: ALWAYS,
    S.RECONCILING: ALWAYS | APPROVALS | {"permit_awaited", "dispatch_intended", "deadline_passed"},
    S.WAITING_EXECUTION: ALWAYS | APPROVALS,
    S.DISPATCHING: ALWAYS | {"dispatch_answered"},
    S.RECONCILE_REQUIRED: ALWAYS | {"settled"},
    S.SUCCEEDED: set(),
    S.FAILED: set(),
    S.CANCELLED: set(),
}


def ready(state: State, kind: EventType) -> Run:
    """A run in that state of which the event asks nothing more."""
    fresh = {
        E.MODEL_FAILED: {"asked": EPOCH},
        E.PROPOSED: {"asked": EPOCH},
        E.PROPOSAL_REJECTED: {"asked": EPOCH},
        E.MODEL_BUDGET_SPENT: {"model_requests_spent": 2},
        E.LOOKED_UP: {"cancel": state is S.NEW},
        E.PERMIT_AWAITED: {"looked": EPOCH},
        E.DISPATCH_INTENDED: {"looked": EPOCH},
        E.DISPATCH_ANSWERED: {"intended": EPOCH, "dispatches_spent": 1, "doubtful": 1},
        E.DEADLINE_PASSED: {"looked": EPOCH},
        E.APPROVED: {"approval": QUESTION},
        E.APPROVAL_VOIDED: {"approval": QUESTION},
    }
    return a_run(state, **fresh.get(kind, {}))


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", EventType)
def test_each_state_takes_its_events_and_no_other(state: State, kind: EventType) -> None:
    """Each pair of state and event is a move one version further, or is refused and changes nothing."""
    run, happened = ready(state, kind), event(kind)
    if kind.value not in EXPECTED[state]:
        refuses(run, happened)
        return
    before = deepcopy(run)
    assert allows(run, happened)
    after = evolve(run, happened)
    assert (after.version, after.id, after.contract) == (run.version + 1, run.id, run.contract)
    assert run == before


def test_a_run_is_opened_once() -> None:
    """Opening makes a new run of version and epoch 1 with the contract's budget, and is no event of a stored run."""
    run, first = machine.opened("r", CONTRACT, "1-a")
    assert run == Run(id="r", contract=CONTRACT, owner="1-a", dispatches_limit=2)
    assert (run.state, run.version, run.epoch, run.dispatches_spent) == (S.NEW, 1, 1, 0)
    assert first == Event(E.OPENED, {"contract": CONTRACT.plain(), "owner": "1-a"})


CONDITIONS: dict[str, tuple[State, EventType, dict[str, Any], dict[str, Any]]] = {
    "a request is not answered yet": (S.NEW, E.MODEL_REQUESTED, {"asked": EPOCH}, {}),
    "the model budget is spent": (S.NEW, E.MODEL_REQUESTED, {"model_requests_spent": 2}, {}),
    "a cancel was asked": (S.NEW, E.MODEL_REQUESTED, {"cancel": True}, {}),
    "no request to fail": (S.NEW, E.MODEL_FAILED, {"asked": 0}, {}),
    "the failed request is of an older epoch": (S.NEW, E.MODEL_FAILED, {"asked": EPOCH - 1}, {}),
    "no request to answer": (S.NEW, E.PROPOSED, {"asked": 0}, {}),
    "the answer is of an older epoch": (S.NEW, E.PROPOSED, {"asked": EPOCH - 1}, {}),
    "no request to refuse": (S.NEW, E.PROPOSAL_REJECTED, {"asked": 0}, {}),
    "the refused answer is of an older epoch": (S.NEW, E.PROPOSAL_REJECTED, {"asked": EPOCH - 1}, {}),
    "a model request is left": (S.NEW, E.MODEL_BUDGET_SPENT, {"model_requests_spent": 1}, {}),
    "no plan to look for": (S.NEW, E.LOOKED_UP, {"cancel": False}, {}),
    "the write is about to leave": (S.DISPATCHING, E.LOOKED_UP, {"intended": EPOCH}, {}),
    "waiting without a look-up": (S.RECONCILING, E.PERMIT_AWAITED, {"looked": 0}, {}),
    "waiting after an old look-up": (S.RECONCILING, E.PERMIT_AWAITED, {"looked": EPOCH - 1}, {}),
    "an intent without a look-up": (S.RECONCILING, E.DISPATCH_INTENDED, {"looked": 0}, {}),
    "an intent after an old look-up": (S.RECONCILING, E.DISPATCH_INTENDED, {"looked": EPOCH - 1}, {}),
    "an intent over the budget": (S.RECONCILING, E.DISPATCH_INTENDED, {"dispatches_spent": 2}, {}),
    "an intent after a cancel": (S.RECONCILING, E.DISPATCH_INTENDED, {"cancel": True}, {}),
    "an intent while a doubtful attempt could be doubled": (
        S.RECONCILING,
        E.DISPATCH_INTENDED,
        {"doubtful": 1, "dispatches_spent": 1, "contract": contract(fences=False, deduplicates=False)},
        {},
    ),
    "no dispatch to answer": (S.DISPATCHING, E.DISPATCH_ANSWERED, {"intended": 0}, {}),
    "the answer is to an older dispatch": (S.DISPATCHING, E.DISPATCH_ANSWERED, {"intended": EPOCH - 1}, {}),
    "there is no deadline before a plan": (S.NEW, E.DEADLINE_PASSED, {"contract": contract(deadline=None)}, {}),
    "there is no deadline": (S.RECONCILING, E.DEADLINE_PASSED, {"contract": contract(deadline=None)}, {}),
    "the deadline waits for the model's answer": (S.NEW, E.DEADLINE_PASSED, {"asked": EPOCH}, {}),
    "the deadline waits for a look-up": (S.RECONCILING, E.DEADLINE_PASSED, {"looked": EPOCH - 1}, {}),
    "a yes to no question": (S.WAITING_EXECUTION, E.APPROVED, {"approval": None}, {}),
    "a second yes": (S.WAITING_EXECUTION, E.APPROVED, {"approval": QUESTION | {"by": "ann"}}, {}),
    "a yes to another question": (S.WAITING_EXECUTION, E.APPROVED, {}, {"digest": "e"}),
    "nothing to void": (S.WAITING_EXECUTION, E.APPROVAL_VOIDED, {"approval": None}, {}),
    "a grant of nothing": (S.RECONCILE_REQUIRED, E.GRANTED, {}, {"dispatches": 0}),
    "a grant of less than nothing": (S.RECONCILE_REQUIRED, E.GRANTED, {}, {"dispatches": -1}),
    "settled as something else": (S.RECONCILE_REQUIRED, E.SETTLED, {}, {"as": "cancelled"}),
    "settled as a state that is no end": (S.RECONCILE_REQUIRED, E.SETTLED, {}, {"as": "planned"}),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_an_event_that_comes_at_the_wrong_moment_is_refused(name: str) -> None:
    """Each condition beside the table of states refuses by itself: without it the same event is a move."""
    state, kind, wrong, detail = CONDITIONS[name]
    run = ready(state, kind)
    assert allows(run, event(kind))
    refuses(replace(run, **wrong), event(kind, **detail))


def test_each_condition_is_tried() -> None:
    """No event has a condition that the cases above leave out."""
    assert {kind for _, kind, _, _ in CONDITIONS.values()} == set(machine._CONDITIONS)


# -- what comes next


def _expected_step(run: Run, permit: bool, expired: bool) -> str:
    """The first rule that fits, in the words of the design."""
    planning = run.state is S.NEW and not run.cancel
    asked, intended, looked = (epoch == EPOCH for epoch in (run.asked, run.intended, run.looked))
    rules = {
        "halt": run.state in FINAL,
        "dispatch": run.state is S.DISPATCHING and intended,
        "ask": planning and asked,
        "deadline_passed": expired and (planning or (run.state is S.RECONCILING and looked)),
        "model_budget_spent": planning and run.model_requests_spent == 2,
        "model_requested": planning,
        "look up": not looked,
        "rest": run.state is not S.RECONCILING,
        "permit_awaited": not permit,
        "dispatch_intended": True,
    }
    return next(name for name, fits in rules.items() if fits)


def _told(step: Step) -> str:
    match step:
        case Decide(happened):
            return happened.type.value
        case AskModel(goal):
            assert goal == GOAL
            return "ask"
        case LookUp(key, epoch):
            assert (key, epoch) == ("r:ticket", EPOCH)
            return "look up"
        case Dispatch(key, epoch, action):
            assert (key, epoch, action) == ("r:ticket", EPOCH, GOAL)
            return "dispatch"
        case Halt():
            return "halt"
    raise AssertionError(step)


@pytest.mark.parametrize("state", State)
def test_the_next_step_is_the_first_rule_that_fits(state: State) -> None:
    """Every combination of permit, cancel, deadline, model budget and freshness has the step of the design."""
    freshness = (0, 1, EPOCH - 1, EPOCH)
    deadlines = ((None, 1e9, False), (DEADLINE, DEADLINE - 1, False), (DEADLINE, DEADLINE, True), (DEADLINE, 1e9, True))
    contracts = {deadline: contract(deadline=deadline) for deadline in (None, DEADLINE)}
    tried = 0
    for asked, intended, looked in product(freshness, repeat=3):
        for cancel, permit, spent, (deadline, now, expired) in product((0, 1), (0, 1), (0, 2), deadlines):
            values = {"asked": asked, "intended": intended, "looked": looked, "cancel": bool(cancel)}
            run = a_run(state, **values, model_requests_spent=spent, contract=contracts[deadline], proposal=GOAL)
            told = _told(next_step(run, bool(permit), now))
            assert told == _expected_step(run, bool(permit), expired).replace("rest", "halt"), run
            tried += 1
    assert tried == 4**3 * 2**3 * 4


@pytest.mark.parametrize(
    ("run", "permit", "now"),
    [
        (a_run(S.NEW), False, 0.0),
        (a_run(S.NEW, model_requests_spent=2), False, 0.0),
        (a_run(S.NEW), False, 200.0),
        (a_run(S.RECONCILING, looked=EPOCH), False, 0.0),
        (a_run(S.RECONCILING, looked=EPOCH), True, 0.0),
        (a_run(S.RECONCILING, looked=EPOCH), True, 200.0),
    ],
)
def test_what_the_machine_decides_it_also_allows(run: Run, permit: bool, now: float) -> None:
    """A decision of `next_step` is a move that `evolve` accepts, and each of the six kinds is one."""
    step = next_step(run, permit, now)
    assert isinstance(step, Decide)
    assert evolve(run, step.event).version == run.version + 1


def test_an_intent_names_its_attempt_its_key_and_its_bytes() -> None:
    """The history can prove later which action was about to be sent, and as which attempt."""
    step = next_step(a_run(S.RECONCILING, looked=EPOCH, dispatches_spent=1), True, 0.0)
    detail = {"attempt": 2, "key": "r:ticket", "action_sha256": digest(canonical(GOAL))}
    assert step == Decide(Event(E.DISPATCH_INTENDED, detail))


@pytest.mark.parametrize("state", State)
def test_the_journals_own_columns_decide_nothing(state: State) -> None:
    """Version, owner, head and reason have no influence on the next step."""
    run = a_run(state, looked=EPOCH)
    other = replace(run, version=99, owner="9-z", head="f" * 64, reason="for no reason")
    assert next_step(run, True, 0.0) == next_step(other, True, 0.0)


# -- what becomes of a run

LAST = ("none", "unsent", "refused", "returned", "unknown")
TOOLS = {"fences": [(True, True), (True, False)], "de-duplicates": [(False, True)], "neither": [(False, False)]}
AGAIN, PERSON = S.RECONCILING, S.RECONCILE_REQUIRED
ABSENT: dict[tuple[str, str], tuple[State, ...]] = {
    ("fences", "budget left"): (AGAIN, AGAIN, S.FAILED, AGAIN, AGAIN),
    ("de-duplicates", "budget left"): (AGAIN, AGAIN, S.FAILED, AGAIN, AGAIN),
    ("neither", "budget left"): (AGAIN, AGAIN, S.FAILED, PERSON, PERSON),
    ("fences", "budget spent"): (PERSON, PERSON, S.FAILED, PERSON, PERSON),
    ("de-duplicates", "budget spent"): (PERSON, PERSON, S.FAILED, PERSON, PERSON),
    ("neither", "budget spent"): (PERSON, PERSON, S.FAILED, PERSON, PERSON),
    ("fences", "cancel asked"): (S.CANCELLED,) * 5,
    ("de-duplicates", "cancel asked"): (S.CANCELLED, S.CANCELLED, S.CANCELLED, PERSON, PERSON),
    ("neither", "cancel asked"): (S.CANCELLED, S.CANCELLED, S.CANCELLED, PERSON, PERSON),
    ("fences", "deadline passed"): (S.FAILED,) * 5,
    ("de-duplicates", "deadline passed"): (S.FAILED, S.FAILED, S.FAILED, PERSON, PERSON),
    ("neither", "deadline passed"): (S.FAILED, S.FAILED, S.FAILED, PERSON, PERSON),
}
CASES = [
    (fences, deduplicates, situation, last, state)
    for (kind, situation), states in ABSENT.items()
    for fences, deduplicates in TOOLS[kind]
    for last, state in zip(LAST, states, strict=True)
]


def after_attempt(last: str, *, fences: bool, deduplicates: bool, situation: str = "") -> Run:
    """A run whose one attempt ended so; an intent whose process died is the unknown one."""
    run = a_run(S.RECONCILING, looked=EPOCH, contract=contract(fences=fences, deduplicates=deduplicates))
    if last != "none":
        run = evolve(run, event(E.DISPATCH_INTENDED))
    if last == "unknown":
        run = evolve(run, event(E.CLAIMED))
    elif last != "none":
        run = evolve(run, event(E.DISPATCH_ANSWERED, outcome=last, message="no such source"))
    if situation == "budget spent":
        run = replace(run, dispatches_limit=run.dispatches_spent)
    return evolve(run, event(E.CANCEL_REQUESTED)) if situation == "cancel asked" else run


@pytest.mark.parametrize(("fences", "deduplicates", "situation", "last", "state"), CASES)
def test_what_an_absent_resource_means(
    fences: bool, deduplicates: bool, situation: str, last: str, state: State
) -> None:
    """Absent is a verdict only where no older attempt can still land, and a new dispatch only where none can double."""
    run = after_attempt(last, fences=fences, deduplicates=deduplicates, situation=situation)
    run = evolve(run, event(E.LOOKED_UP))
    step = next_step(run, True, 200.0 if situation == "deadline passed" else 0.0)
    if situation == "deadline passed" and isinstance(step, Decide):
        run = evolve(run, step.event)
    assert run.state is state
    assert (run.resource, run.looked == run.epoch) == (None, True)


def test_an_approval_is_a_permit_for_one_dispatch_until_it_expires() -> None:
    """A question is none; the intent uses the approval up, in the same row."""
    run = a_run(S.RECONCILING, looked=EPOCH)
    asked = evolve(run, event(E.APPROVAL_ASKED))
    assert next_step(asked, False, 0) == Decide(Event(E.PERMIT_AWAITED))
    approved = evolve(asked, event(E.APPROVED))
    assert next_step(approved, False, 50.0) == Decide(Event(E.PERMIT_AWAITED))
    step = next_step(approved, False, 49.9)
    assert isinstance(step, Decide)
    assert step.event.type is E.DISPATCH_INTENDED
    assert evolve(approved, step.event).approval is None
    voided = evolve(approved, event(E.APPROVAL_VOIDED))
    assert (voided.approval, voided.reason) == (None, "the rules changed")


@pytest.mark.parametrize("forced", [False, True])
def test_after_the_settling_time_nothing_can_land_any_more(forced: bool) -> None:
    """The time runs from the attempt's end; a frozen sender that was replaced by force has none."""
    tool = replace(contract(fences=False, deduplicates=False).tool, settles_after_s=60.0)
    run = a_run(S.DISPATCHING, contract=replace(CONTRACT, tool=tool, deadline=None), last=Outcome.UNKNOWN, doubtful=1)
    run = evolve(run, Event(E.CLAIMED, {"owner": "2-x", "forced": forced}, at=100_000))
    assert next_step(run, True, 159.9) == LookUp(run.key, EPOCH + 1, settled=False)
    assert next_step(run, True, 160) == LookUp(run.key, EPOCH + 1, settled=not forced)
    early = evolve(run, event(E.LOOKED_UP))
    assert (early.state, early.settles) == (S.RECONCILE_REQUIRED, not forced)
    late = evolve(run, event(E.LOOKED_UP, settled=True))
    assert (late.state, late.doubtful) == (S.RECONCILING, 0)


@pytest.mark.parametrize("last", [o for o in Outcome if o is not Outcome.NONE])
@pytest.mark.parametrize("deduplicates", [True, False])
def test_what_nobody_can_look_up_is_repeated_only_where_that_is_harmless(last: Outcome, deduplicates: bool) -> None:
    """An attempt without an answer may be repeated on a server that de-duplicates; an answer is never repeated."""
    run = after_attempt(last.value, fences=False, deduplicates=deduplicates)
    after = evolve(run, event(E.LOOKED_UP, unknown="no look-up"))
    wanted = {
        Outcome.RETURNED: S.RECONCILE_REQUIRED,
        Outcome.UNKNOWN: S.RECONCILING if deduplicates else S.RECONCILE_REQUIRED,
        Outcome.REFUSED: S.FAILED,
        Outcome.UNSENT: S.RECONCILING,
    }
    assert after.state is wanted[last]


@pytest.mark.parametrize("found", [GOAL, OTHER])
@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("tool", [tool for tools in TOOLS.values() for tool in tools])
@pytest.mark.parametrize("situation", ["budget left", "budget spent", "cancel asked"])
def test_a_found_resource_is_the_verdict(
    found: dict[str, str], last: str, tool: tuple[bool, bool], situation: str
) -> None:
    """Whatever the write answered and whoever asked to cancel, only the resource compared with the goal decides."""
    run = after_attempt(last, fences=tool[0], deduplicates=tool[1], situation=situation)
    run = evolve(run, event(E.LOOKED_UP, found={"id": 7, "action": found}))
    if found == GOAL:
        assert (run.state, run.reason) == (S.SUCCEEDED, "")
    else:
        assert run.state is S.FAILED
        assert run.reason == 'the ticket differs from the goal: title is "another", wanted "a title"'
    assert run.resource == {"id": 7, "action": found}


@pytest.mark.parametrize("deduplicates", [True, False])
def test_a_refusal_does_not_hide_an_earlier_doubtful_attempt(deduplicates: bool) -> None:
    """Without a fence, a refused second attempt says nothing of the first, so the run does not end as failed."""
    run = after_attempt("refused", fences=False, deduplicates=deduplicates)
    run = evolve(replace(run, doubtful=1), event(E.LOOKED_UP))
    assert run.state is (AGAIN if deduplicates else PERSON)


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.NONE])
def test_an_answer_leads_to_a_look_up_in_a_higher_epoch(outcome: Outcome) -> None:
    """Whatever the tool answered, the next step reads the resource with an epoch above the attempt's."""
    run = evolve(a_run(S.RECONCILING, looked=EPOCH), event(E.DISPATCH_INTENDED))
    assert (run.state, run.dispatches_spent, run.doubtful, run.last) == (S.DISPATCHING, 1, 1, Outcome.UNKNOWN)
    after = evolve(run, event(E.DISPATCH_ANSWERED, outcome=outcome, message="said"))
    assert next_step(after, True, 200.0) == LookUp("r:ticket", EPOCH + 1)
    assert (after.last, after.doubtful) == (outcome, 0 if outcome in machine.CLEAN else 1)
    assert after.refusal == ("said" if outcome is Outcome.REFUSED else "")
    assert after.dispatches_spent == 1


@pytest.mark.parametrize("state", [s for s in State if s not in FINAL])
def test_a_take_over_makes_everything_stale(state: State) -> None:
    """After a claim nothing is fresh: an old intent is not sent, an old look-up does not count, a debit stays spent."""
    run = a_run(state, asked=EPOCH, intended=EPOCH, looked=EPOCH, dispatches_spent=1, model_requests_spent=1)
    after = evolve(run, event(E.CLAIMED))
    assert (after.epoch, after.owner, after.state) == (EPOCH + 1, "2-b", state)
    assert (after.dispatches_spent, after.model_requests_spent) == (1, 1)
    wanted = Decide(Event(E.MODEL_REQUESTED, {"request": 2})) if state is S.NEW else LookUp("r:ticket", EPOCH + 1)
    assert next_step(after, True, 0.0) == wanted


@pytest.mark.parametrize("state", sorted(FINAL))
def test_an_end_is_an_end(state: State) -> None:
    """A finished run does nothing and takes no event, whatever its other columns hold."""
    for epoch, cancel in product((0, EPOCH), (False, True)):
        run = a_run(state, asked=epoch, intended=epoch, looked=epoch, cancel=cancel)
        assert {next_step(run, permit, now) for permit in (False, True) for now in (0.0, 200.0)} == {Halt()}
        for kind in EventType:
            refuses(run, event(kind))


def test_the_operation_key_is_the_runs_and_stays() -> None:
    """The key comes from the run's id and the contract's resource, and is the same for every attempt."""
    run = a_run(S.RECONCILING, looked=EPOCH)
    assert run.key == "r:ticket"
    for kind in (E.DISPATCH_INTENDED, E.DISPATCH_ANSWERED, E.LOOKED_UP, E.CLAIMED, E.GRANTED):
        run = evolve(run, event(kind, key="another"))
        assert run.key == "r:ticket"


def test_a_proposal_that_differs_from_the_goal_reaches_no_tool() -> None:
    """A well-formed proposal of something else ends the run, with the difference, before any look-up or dispatch."""
    run = a_run(S.NEW, asked=EPOCH)
    after = evolve(run, event(E.PROPOSED, proposal=OTHER, metadata={"id": "m"}))
    assert after.state is S.FAILED
    assert after.reason == 'the proposal differs from the goal: title is "another", wanted "a title"'
    assert (after.proposal, after.metadata) == (OTHER, {"id": "m"})
    assert (after.dispatches_spent, after.looked, next_step(after, True, 0.0)) == (0, 0, Halt())


def test_the_model_is_asked_again_only_where_that_can_help() -> None:
    """No answer keeps the run new with its debit; a refused answer is final; a spent budget ends the run."""
    run = evolve(a_run(S.NEW), event(E.MODEL_REQUESTED))
    assert (run.asked, run.model_requests_spent) == (EPOCH, 1)
    rejected = evolve(run, event(E.PROPOSAL_REJECTED))
    assert (rejected.state, rejected.reason) == (S.FAILED, "the model's answer was refused: two calls")
    run = evolve(run, event(E.MODEL_FAILED))
    assert (run.state, run.asked, run.model_requests_spent) == (S.NEW, 0, 1)
    run = evolve(evolve(run, event(E.MODEL_REQUESTED)), event(E.MODEL_FAILED))
    run = evolve(run, event(E.MODEL_BUDGET_SPENT))
    assert (run.state, run.model_requests_spent) == (S.FAILED, 2)
    assert run.reason == "the model request budget is spent (2 of 2) and there is no proposal"


@pytest.mark.parametrize("verdict", [S.SUCCEEDED, S.FAILED])
def test_a_settled_run_is_marked_as_a_persons_word(verdict: State) -> None:
    """The end that a person gave names the person, and no other end does."""
    run = evolve(a_run(S.RECONCILE_REQUIRED), event(E.SETTLED, **{"as": verdict}))
    assert (run.state, run.settled_by) == (verdict, "ann")
    assert run.reason == f"settled as {verdict} by ann, not by a check: looked"
    assert evolve(a_run(S.PLANNED), event(E.LOOKED_UP, found=RESOURCE)).settled_by is None


@pytest.mark.parametrize("state", [s for s in State if s not in FINAL])
@pytest.mark.parametrize("kind", [E.GRANTED, E.CANCEL_REQUESTED])
def test_an_operators_word_forces_a_fresh_look_up(state: State, kind: EventType) -> None:
    """A grant raises the limit and a cancel sets its mark; both make the last look-up stale and move no state."""
    run = a_run(state, looked=EPOCH, dispatches_spent=2)
    after = evolve(run, event(kind, dispatches=4))
    granted = kind is E.GRANTED
    assert "look-up comes first" in after.reason or (granted and state is not S.RECONCILE_REQUIRED)
    assert after.but(reason="") == replace(
        run, looked=0, version=10, cancel=not granted, dispatches_limit=run.dispatches_limit + 4 * granted
    )
    if state is not S.NEW or not granted:
        assert next_step(after, True, 0.0) == LookUp("r:ticket", EPOCH)


def test_a_granted_dispatch_is_used_after_the_look_up() -> None:
    """From a spent budget, a grant, a look-up and a permit lead to one more intent."""
    run = evolve(a_run(S.RECONCILE_REQUIRED, looked=EPOCH, dispatches_spent=2, doubtful=1), event(E.GRANTED))
    run = evolve(run, event(E.LOOKED_UP))
    step = next_step(run, True, 0.0)
    assert isinstance(step, Decide)
    assert evolve(run, step.event).dispatches_spent == 3


def test_a_run_reads_like_a_picture_of_its_state() -> None:
    """The representation has name, state, version, epoch, budget, last outcome, and the cancel mark when it is set."""
    run = a_run(S.DISPATCHING, dispatches_spent=1, last=Outcome.UNKNOWN)
    assert repr(run) == "<r dispatching v9 e3 1/2 last=unknown>"
    assert repr(replace(run, cancel=True)) == "<r dispatching v9 e3 1/2 last=unknown cancel>"


# -- the page

TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- /table -->)", re.DOTALL)


def table() -> str:
    """The table of states for docs/machine.md."""
    order = list(EventType)
    lines = ["| state | what is certainly true | events allowed |", "|---|---|---|"]
    for state in State:
        events = ", ".join(f"`{kind}`" for kind in sorted(machine.ALLOWED[state], key=order.index))
        lines.append(f"| `{state}` | {machine.CERTAIN[state]} | {events or 'none'} |")
    return "\n".join(lines) + "\n"


def moves() -> set[tuple[str, str]]:
    """Every move from one state to another that some history of a small run can reach, for any kind of tool."""
    happened = [event(kind) for kind in EventType if kind is not E.OPENED]
    happened += [event(E.LOOKED_UP, found={"id": 7, "action": action}) for action in (GOAL, OTHER)]
    happened += [event(E.DISPATCH_ANSWERED, outcome=outcome) for outcome in ("refused", "unknown", "unsent")]
    happened += [event(E.SETTLED, **{"as": "succeeded"}), event(E.PROPOSED, proposal=OTHER)]
    found: set[tuple[str, str]] = set()
    for fences, deduplicates in product((True, False), repeat=2):
        start = machine.opened("r", contract(fences=fences, deduplicates=deduplicates), "1-a")[0]
        seen, todo = {repr(start): start}, [start]
        while todo:
            run = todo.pop()
            for after in _histories(run, happened):
                found |= {(run.state.value, after.state.value)} if after.state is not run.state else set()
                key = canonical([str(getattr(after, name)) for name in vars(after) if name != "contract"])
                if key not in seen:
                    seen[key] = after
                    todo.append(after)
    return found


def _histories(run: Run, happened: list[Event]) -> Iterator[Run]:
    for one in happened:
        if allows(run, one):
            after = replace(evolve(run, one), version=1, reason="", owner="")
            if after.epoch <= EPOCH and after.dispatches_limit <= 3:
                yield after


def drawn(page: str) -> set[tuple[str, str]]:
    """The arrows of the page's diagram; one that leaves the group `open` leaves each of its states."""
    body = page.partition("```mermaid\n")[2].partition("```")[0]
    group = set(re.findall(r"\w+", re.sub(r":.*", "", body.split("state open {")[1].split("}")[0])))
    arrows = re.findall(r"(\w+) --> (\w+)", body)
    return {(source, target) for head, target in arrows for source in (group if head == "open" else {head})}


def test_the_pages_table_is_the_machines() -> None:
    """The table in docs/machine.md is what the machine has; `python tests/test_machine.py` writes it."""
    (stood,) = TABLE.findall(PAGE.read_text())
    assert stood == table()


def test_the_pages_diagram_has_every_move_and_no_other() -> None:
    """The arrows in docs/machine.md are exactly the moves that can be reached."""
    assert drawn(PAGE.read_text()) == moves()


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
