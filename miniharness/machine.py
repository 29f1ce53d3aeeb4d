"""The machine: what a run is, what to do next, and what becomes of it. Pure: no I/O, no clock, no storage.

Theory of operation
-------------------
A run moves through states; a state's name says what is certainly true. Two functions hold all of it:

* `next_step(run, permit, now)` says what to do. A step is a request to the outside (ask the model, look up, dispatch),
  a decision that only has to be written down, or a halt.
* `evolve(run, event)` says what became of the run. It raises `IllegalMove`, and changes nothing, when the state does
  not allow the event.

The engine writes every event to disk before it asks for the next step, so a process can die between any two
instructions and another one continues from the row:

* Before a model request or a dispatch its debit is on disk. A process that dies afterwards has spent that unit:
  N deaths can never buy N+1 requests.
* The intent to dispatch stands in the same row as the debit. An intent without an answer *is* the unknown outcome;
  no dying process has to write it down.
* What was learned outside is good for one **epoch**. The epoch grows when a process takes the run over and after each
  dispatch. `asked`, `intended` and `looked` hold the epoch in which they were written; once it has passed, the model
  may be asked again (if the budget allows), the dispatch must not be sent, and the resource must be looked up again.
  That is the whole recovery: there is no separate code path for it.
* A look-up carries the epoch to the server, which then refuses every older request for that key. So *absent* means
  "not there, and no older attempt can still land": it is **conclusive**. Where the server does not fence, an absent
  is conclusive only if every attempt so far was refused or never left; otherwise it is inconclusive and never ends
  the run as `cancelled` or `failed`.

Whatever the write call answered, the next step is a look-up, and only the look-up compared with the goal
(`check.differences`) makes a run `succeeded`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from miniharness.check import describe, differences
from miniharness.contract import Contract, canonical, digest
from miniharness.errors import IllegalMove


class State(StrEnum):
    """Where a run is."""

    NEW = "new"
    PLANNED = "planned"
    RECONCILING = "reconciling"
    WAITING_EXECUTION = "waiting_execution"
    DISPATCHING = "dispatching"
    RECONCILE_REQUIRED = "reconcile_required"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})

CERTAIN: dict[State, str] = {
    State.NEW: "the contract is stored; nothing was written",
    State.PLANNED: "this proposal is the one; the model is never asked again for it; nothing was written",
    State.RECONCILING: "what is there is undecided; a restart looks it up before anything else",
    State.WAITING_EXECUTION: "no look-up has found the resource; the write waits for a permit",
    State.DISPATCHING: "the intent and its debit are on disk; the write may have happened",
    State.RECONCILE_REQUIRED: "no look-up has found the resource; going on needs a person's decision, or time",
    State.SUCCEEDED: "the resource was looked up and equals the goal",
    State.FAILED: "the run has ended without reaching the goal; the reason says why",
    State.CANCELLED: "nothing was written and nothing can still land",
}


class EventType(StrEnum):
    """What can happen to a run; the values stand in the history."""

    OPENED = "opened"
    CLAIMED = "claimed"
    CONNECTED = "connected"
    MODEL_REQUESTED = "model_requested"
    MODEL_FAILED = "model_failed"
    PROPOSED = "proposed"
    PROPOSAL_REJECTED = "proposal_rejected"
    MODEL_BUDGET_SPENT = "model_budget_spent"
    LOOKED_UP = "looked_up"
    PERMIT_AWAITED = "permit_awaited"
    DISPATCH_INTENDED = "dispatch_intended"
    DISPATCH_ANSWERED = "dispatch_answered"
    DEADLINE_PASSED = "deadline_passed"
    APPROVAL_ASKED = "approval_asked"
    APPROVED = "approved"
    APPROVAL_VOIDED = "approval_voided"
    CANCEL_REQUESTED = "cancel_requested"
    GRANTED = "granted"
    SETTLED = "settled"


E = EventType
_ALWAYS = {E.CLAIMED, E.CONNECTED, E.LOOKED_UP, E.CANCEL_REQUESTED, E.GRANTED, E.APPROVAL_VOIDED}
_APPROVALS = {E.APPROVAL_ASKED, E.APPROVED}

ALLOWED: dict[State, frozenset[EventType]] = {
    State.NEW: frozenset(
        _ALWAYS
        | {E.MODEL_REQUESTED, E.MODEL_FAILED, E.PROPOSED, E.PROPOSAL_REJECTED, E.MODEL_BUDGET_SPENT, E.DEADLINE_PASSED}
    ),
    State.PLANNED: frozenset(_ALWAYS),
    State.RECONCILING: frozenset(_ALWAYS | _APPROVALS | {E.PERMIT_AWAITED, E.DISPATCH_INTENDED, E.DEADLINE_PASSED}),
    State.WAITING_EXECUTION: frozenset(_ALWAYS | _APPROVALS),
    State.DISPATCHING: frozenset(_ALWAYS | {E.DISPATCH_ANSWERED}),
    State.RECONCILE_REQUIRED: frozenset(_ALWAYS | {E.SETTLED}),
    **{state: frozenset() for state in FINAL},
}
"""Which events a state allows. The few conditions that do not fit a table are `_CONDITIONS`, below `evolve`."""


class Outcome(StrEnum):
    """What is known of the last dispatch."""

    NONE = "none"  # there was none
    UNKNOWN = "unknown"  # it may have happened; also every intent without an answer
    RETURNED = "returned"  # the tool answered as if it had happened
    REFUSED = "refused"  # the tool refused it and is declared to do so cleanly
    UNSENT = "unsent"  # the transport knows that no byte of it left


NEVER = 1 << 62  # milliseconds since 1970

CLEAN = frozenset({Outcome.REFUSED, Outcome.UNSENT})


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; `detail` is a JSON object. The journal gives it its time, in milliseconds since 1970."""

    type: EventType
    detail: Mapping[str, Any] = field(default_factory=dict)
    at: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One durable execution as its row has it. `version` is the number of its last event."""

    id: str
    contract: Contract
    state: State = State.NEW
    reason: str = ""
    version: int = 1
    epoch: int = 1
    owner: str = ""
    dispatches_spent: int = 0
    dispatches_limit: int
    model_requests_spent: int = 0
    asked: int = 0  # epoch in which a model request was debited and not yet answered
    intended: int = 0  # epoch of the last intent to dispatch
    ended_at: int = 0  # when the last attempt was over for its sender, in ms since 1970, if the tool settles after that
    looked: int = 0  # epoch in which the resource was last looked up and not there
    doubtful: int = 0  # dispatches that had, or may have had, an effect
    last: Outcome = Outcome.NONE
    refusal: str = ""  # the tool's reason, when `last` is refused
    cancel: bool = False  # a cancel was requested
    settled_by: str | None = None  # the person whose word ended the run, instead of a check
    proposal: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] | None = None  # of the model's response
    resource: Mapping[str, Any] | None = None  # as last found: {"id", "action"}
    approval: Mapping[str, Any] | None = None  # asked for: {"digest", "expires_at" in s since 1970, "by" or null}
    head: str = ""  # digest of the last event; kept by the journal
    pruned: bool = False  # the history of this finished run was removed; the verdict and the head are left

    def but(self, **changes: Any) -> Run:
        """This run with those fields changed. Like `dataclasses.replace`, at a tenth of its cost."""
        assert changes.keys() <= self.__dict__.keys()
        run = object.__new__(Run)
        run.__dict__.update(self.__dict__, **changes)
        return run

    @property
    def key(self) -> str:
        """The operation key: the same for every attempt of this run, and made by nobody else."""
        return f"{self.id}:{self.contract.tool.resource}"

    @property
    def conclusive(self) -> bool:
        """Whether an absent resource also means that no older attempt can still land."""
        return self.contract.tool.fences or self.doubtful == 0

    @property
    def settles(self) -> bool:
        """Whether an absent becomes conclusive by waiting."""
        return self.contract.tool.settles_after_s is not None and self.ended_at != NEVER

    @property
    def may_dispatch(self) -> bool:
        """Whether another dispatch is possible after an absent look-up, permit and deadline aside."""
        return not self.cancel and self.dispatches_spent < self.dispatches_limit and self._repeatable

    @property
    def _repeatable(self) -> bool:
        return self.conclusive or self.contract.tool.deduplicates

    def __repr__(self) -> str:
        spent = f"{self.dispatches_spent}/{self.dispatches_limit}"
        cancel = " cancel" if self.cancel else ""
        return f"<{self.id} {self.state} v{self.version} e{self.epoch} {spent} last={self.last}{cancel}>"


# -- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Halt:
    """Nothing more to do for this process."""

    halts = True


@dataclass(frozen=True, slots=True)
class Decide:
    """A decision of the machine; it only has to be recorded."""

    event: Event
    halts = False


@dataclass(frozen=True, slots=True)
class AskModel:
    """Ask the model once; the debit is on disk."""

    goal: Mapping[str, Any]
    halts = False


@dataclass(frozen=True, slots=True)
class LookUp:
    """Read the resource and let a server that fences refuse everything older than `epoch`."""

    key: str
    epoch: int
    settled: bool = False  # by now no attempt can land any more
    halts = False


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the write, once; the intent and its debit are on disk."""

    key: str
    epoch: int
    action: Mapping[str, Any]
    halts = False


Step = Halt | Decide | AskModel | LookUp | Dispatch


def next_step(run: Run, permit: bool, now: float) -> Step:
    """What to do with `run` now.

    `permit` is the operator's present leave to write; `now` is in seconds since 1970 and serves only the deadline.
    """
    if run.state in FINAL:
        return Halt()
    if run.state is State.DISPATCHING and run.intended == run.epoch:  # a cancel that comes later than this is too late
        return Dispatch(run.key, run.epoch, run.proposal or {})
    expired = run.contract.deadline is not None and now >= run.contract.deadline
    if run.state is State.NEW and not run.cancel:
        return _next_plan_step(run, expired)
    if run.looked != run.epoch:
        return LookUp(run.key, run.epoch, _settled_by(run, now))
    if run.state is not State.RECONCILING:
        return Halt()  # waiting_execution or reconcile_required, looked up in this epoch; the next owner has another
    if expired:
        return Decide(Event(E.DEADLINE_PASSED))
    if not permit and not approved(run, now):
        return Decide(Event(E.PERMIT_AWAITED))
    # reconciling and looked up: `may_dispatch` held then, and whatever changes it since has reset `looked`
    attempt, action = run.dispatches_spent + 1, digest(canonical(run.proposal))
    return Decide(Event(E.DISPATCH_INTENDED, {"attempt": attempt, "key": run.key, "action_sha256": action}))


def approved(run: Run, now: float) -> bool:
    """Whether a person has approved the write, and that still counts."""
    return run.approval is not None and run.approval["by"] is not None and now < run.approval["expires_at"]


def _settled_by(run: Run, now: float) -> bool:
    after_s = run.contract.tool.settles_after_s
    return after_s is not None and run.doubtful > 0 and now >= run.ended_at / 1000 + after_s


def _next_plan_step(run: Run, expired: bool) -> Step:
    if run.asked == run.epoch:
        return AskModel(run.contract.goal)
    if expired:
        return Decide(Event(E.DEADLINE_PASSED))
    if run.model_requests_spent >= run.contract.budget.model_requests:
        return Decide(Event(E.MODEL_BUDGET_SPENT))
    return Decide(Event(E.MODEL_REQUESTED, {"request": run.model_requests_spent + 1}))


# -- evolution --------------------------------------------------------------------------------------------------------


def opened(run_id: str, contract: Contract, owner: str) -> tuple[Run, Event]:
    """A new run and the event that opens its history."""
    run = Run(id=run_id, contract=contract, owner=owner, dispatches_limit=contract.budget.dispatches)
    return run, Event(E.OPENED, {"contract": contract.plain(), "owner": owner})


def allows(run: Run, event: Event) -> bool:
    """Whether `run` may take `event` now."""
    return event.type in ALLOWED[run.state] and _CONDITIONS.get(event.type, _no_condition)(run, event.detail)


def evolve(run: Run, event: Event) -> Run:
    """The run after `event`, one version further.

    Raises:
        IllegalMove: the state or what is known does not allow the event.
    """
    if not allows(run, event):
        raise IllegalMove(f"{event.type} is not possible for run {run.id}, which is {run.state}")
    after = _EFFECTS[event.type](run, event.detail)
    return after.but(version=run.version + 1, ended_at=_attempt_ended(run, event))


def _attempt_ended(run: Run, event: Event) -> int:
    """When the last attempt was over: with its answer, or when its sender was found dead; a frozen one may go on."""
    ended = run.state is State.DISPATCHING and event.type in (E.DISPATCH_ANSWERED, E.CLAIMED)
    if not ended or run.contract.tool.settles_after_s is None:
        return run.ended_at
    return NEVER if event.detail.get("forced") else event.at


_Detail = Mapping[str, Any]


def _no_condition(run: Run, detail: _Detail) -> bool:
    return True


_CONDITIONS: dict[EventType, Callable[[Run, _Detail], bool]] = {
    E.MODEL_REQUESTED: lambda run, d: (
        run.asked != run.epoch and run.model_requests_spent < run.contract.budget.model_requests and not run.cancel
    ),
    E.MODEL_FAILED: lambda run, d: run.asked == run.epoch,
    E.PROPOSED: lambda run, d: run.asked == run.epoch,
    E.PROPOSAL_REJECTED: lambda run, d: run.asked == run.epoch,
    E.MODEL_BUDGET_SPENT: lambda run, d: run.model_requests_spent >= run.contract.budget.model_requests,
    E.LOOKED_UP: lambda run, d: (
        (run.state is not State.NEW or run.cancel)  # before there is a plan only a cancel looks
        and (run.state is not State.DISPATCHING or run.intended != run.epoch)  # the write is about to leave
    ),
    E.PERMIT_AWAITED: lambda run, d: run.looked == run.epoch,
    E.DISPATCH_INTENDED: lambda run, d: run.looked == run.epoch and run.may_dispatch,
    E.DISPATCH_ANSWERED: lambda run, d: run.intended == run.epoch,
    E.DEADLINE_PASSED: lambda run, d: (
        run.contract.deadline is not None
        and (run.looked == run.epoch if run.state is State.RECONCILING else run.asked != run.epoch)
    ),
    E.APPROVED: lambda run, d: (
        run.approval is not None and run.approval["by"] is None and run.approval["digest"] == d["digest"]
    ),
    E.APPROVAL_VOIDED: lambda run, d: run.approval is not None,
    E.GRANTED: lambda run, d: bool(d["dispatches"] >= 1),
    E.SETTLED: lambda run, d: d["as"] in (State.SUCCEEDED, State.FAILED),
}


def _ended(run: Run, state: State, reason: str) -> Run:
    return run.but(state=state, reason=reason)


def _proposed(run: Run, d: _Detail) -> Run:
    """Structure is not truth: the first thing a proposal meets is the goal."""
    run = run.but(asked=0, proposal=d["proposal"], metadata=d["metadata"])
    if wrong := differences(d["proposal"], run.contract.action):
        return _ended(run, State.FAILED, f"the proposal differs from the goal: {describe(wrong)}")
    return run.but(state=State.PLANNED)


def _model_budget_spent(run: Run, d: _Detail) -> Run:
    spent = f"{run.model_requests_spent} of {run.contract.budget.model_requests}"
    return _ended(run, State.FAILED, f"the model request budget is spent ({spent}) and there is no proposal")


def _looked_up(run: Run, d: _Detail) -> Run:
    """The verdict, or what an absent resource means; the table in docs/machine.md."""
    if d.get("settled"):
        run = run.but(doubtful=0)
    if d["found"] is None:
        run = run.but(looked=run.epoch, resource=None)
        return _unknowable(run) if "unknown" in d else _absent(run)
    run = run.but(resource=d["found"])
    if wrong := differences(d["found"]["action"], run.contract.goal):
        return _ended(run, State.FAILED, f"the {run.contract.tool.resource} differs from the goal: {describe(wrong)}")
    return _ended(run, State.SUCCEEDED, "")


def _absent(run: Run) -> Run:
    spent = f"{run.dispatches_spent} of {run.dispatches_limit}"
    if run.conclusive and run.cancel:
        return _ended(run, State.CANCELLED, "cancelled on request")
    if run.conclusive and run.last is Outcome.REFUSED:
        return _ended(run, State.FAILED, f"the tool refused the write: {run.refusal}")
    if run.may_dispatch:
        return run.but(state=State.RECONCILING, reason="")
    if run.conclusive:
        return run.but(state=State.RECONCILE_REQUIRED, reason=f"the dispatch budget is spent ({spent})")
    return run.but(
        state=State.RECONCILE_REQUIRED,
        reason=f"an earlier attempt ({spent}) may still take effect; nobody can tell",
    )


def _unknowable(run: Run) -> Run:
    """Nobody can tell what is there: known is only what was never sent, and what can safely be sent again."""
    unanswered = run.last in (Outcome.UNKNOWN, Outcome.UNSENT)
    if run.doubtful == 0 or (unanswered and run.may_dispatch):
        return _absent(run)
    answered = "the tool answered" if run.last is Outcome.RETURNED else "an attempt may have taken effect"
    reason = f"{answered}, and nobody can look up what is there"
    return run.but(state=State.RECONCILE_REQUIRED, reason=reason)


def _dispatch_intended(run: Run, d: _Detail) -> Run:
    return run.but(
        state=State.DISPATCHING,
        reason="",
        intended=run.epoch,
        dispatches_spent=run.dispatches_spent + 1,
        doubtful=run.doubtful + 1,
        last=Outcome.UNKNOWN,
        approval=None,  # an approval covers one dispatch
    )


def _dispatch_answered(run: Run, d: _Detail) -> Run:
    outcome = Outcome(d["outcome"])
    return run.but(
        state=State.RECONCILING,
        epoch=run.epoch + 1,
        last=outcome,
        refusal=d["message"] if outcome is Outcome.REFUSED else "",
        doubtful=run.doubtful - (outcome in CLEAN),
    )


def _deadline_passed(run: Run, d: _Detail) -> Run:
    if run.conclusive:
        return _ended(run, State.FAILED, "the deadline passed before the write")
    reason = "the deadline passed and an earlier attempt may still take effect"
    return run.but(state=State.RECONCILE_REQUIRED, reason=reason)


def _cancel_requested(run: Run, d: _Detail) -> Run:
    return run.but(cancel=True, looked=0, reason="a cancel was requested; a look-up comes first")


def _granted(run: Run, d: _Detail) -> Run:
    limit = run.dispatches_limit + d["dispatches"]
    reason = "more dispatches were granted; a look-up comes first"
    return run.but(dispatches_limit=limit, looked=0, reason=reason if run.state is State.RECONCILE_REQUIRED else "")


def _settled(run: Run, d: _Detail) -> Run:
    reason = f"settled as {d['as']} by {d['by']}, not by a check: {d['why']}"
    return _ended(run, State(d["as"]), reason).but(settled_by=d["by"])


_EFFECTS: dict[EventType, Callable[[Run, _Detail], Run]] = {
    E.CLAIMED: lambda run, d: run.but(epoch=run.epoch + 1, owner=d["owner"]),
    E.CONNECTED: lambda run, d: run,
    E.MODEL_REQUESTED: lambda run, d: run.but(asked=run.epoch, model_requests_spent=run.model_requests_spent + 1),
    E.MODEL_FAILED: lambda run, d: run.but(asked=0),
    E.PROPOSED: _proposed,
    E.PROPOSAL_REJECTED: lambda run, d: _ended(run, State.FAILED, f"the model's answer was refused: {d['reason']}"),
    E.MODEL_BUDGET_SPENT: _model_budget_spent,
    E.LOOKED_UP: _looked_up,
    E.PERMIT_AWAITED: lambda run, d: run.but(state=State.WAITING_EXECUTION, reason="no permit to write was given"),
    E.DISPATCH_INTENDED: _dispatch_intended,
    E.DISPATCH_ANSWERED: _dispatch_answered,
    E.DEADLINE_PASSED: _deadline_passed,
    E.APPROVAL_ASKED: lambda run, d: run.but(
        approval={"digest": d["digest"], "expires_at": d["expires_at"], "by": None}, reason="an approval is asked for"
    ),
    E.APPROVED: lambda run, d: run.but(
        approval={**(run.approval or {}), "by": d["by"]}, reason=f"approved by {d['by']}; a look-up comes first"
    ),
    E.APPROVAL_VOIDED: lambda run, d: run.but(approval=None, reason=d["why"]),
    E.CANCEL_REQUESTED: _cancel_requested,
    E.GRANTED: _granted,
    E.SETTLED: _settled,
}
