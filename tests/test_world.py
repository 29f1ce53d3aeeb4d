"""The real machine in a model of the world: every interleaving within small bounds, breadth-first, nothing sampled.

A dispatch is at most one request on the wire. It may be applied, applied with its answer lost, lost, delayed and land
or be lost at any later moment (also after it was acknowledged), refused cleanly, answered without effect, or never
leave. Two processes live at once at most: the owner, and a predecessor that was frozen or replaced and goes on from
what it has in memory. Either may die before and after every step; what it records passes the rule of `Runs.record`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import GOAL

from miniharness import machine
from miniharness.contract import Budget, Contract, Tool, canonical
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
)
from miniharness.report import next_command

E = EventType
NextStep = Callable[[Run, bool, float], Step]
Evolve = Callable[[Run, Event], Run]
Allows = Callable[[Run, Event], bool]

DEADLINE, BEFORE, AFTER = 100.0, 0.0, 200.0
OTHER = {**GOAL, "title": "another"}
META = {"model": "world"}

CONNECTED = Event(E.CONNECTED, {"server": "world"})
CLAIMED = Event(E.CLAIMED, {"owner": "1-restart", "forced": False})
CANCEL = Event(E.CANCEL_REQUESTED)
ASKED = Event(E.APPROVAL_ASKED, {"digest": "d", "expires_at": 1e9})
APPROVED = Event(E.APPROVED, {"digest": "d", "by": "ann"})
GRANT = Event(E.GRANTED, {"dispatches": 1, "by": "ann", "why": "asked"})
SETTLE = Event(E.SETTLED, {"as": "failed", "by": "ann", "why": "looked"})
PLANNED = Event(E.PROPOSED, {"proposal": GOAL, "metadata": META})
MODEL_ANSWERS = {
    "right": PLANNED,
    "wrong": Event(E.PROPOSED, {"proposal": OTHER, "metadata": META}),
    "rejected": Event(E.PROPOSAL_REJECTED, {"reason": "two calls"}),
    "no answer": Event(E.MODEL_FAILED, {"message": "529"}),
}
ABSENT = Event(E.LOOKED_UP, {"key": "k", "found": None})
FOUND = Event(E.LOOKED_UP, {"key": "k", "found": {"id": 1, "action": GOAL}})
UNKNOWABLE = Event(E.LOOKED_UP, {"key": "k", "found": None, "unknown": "there is no look-up"})
FOUND_OTHER = Event(E.LOOKED_UP, {"key": "k", "found": {"id": 2, "action": OTHER}})
ANSWERED = {o: Event(E.DISPATCH_ANSWERED, {"outcome": o, "message": o.value}) for o in Outcome if o is not Outcome.NONE}

SERVERS = {
    "fences, de-duplicates": (True, True, False),
    "fences only": (True, False, False),
    "de-duplicates only": (False, True, False),
    "neither": (False, False, False),
    "no look-up, de-duplicates": (False, True, True),
    "no look-up": (False, False, True),
}


class Process(NamedTuple):
    """What one process has in memory."""

    run: int  # its copy of the row
    fresh: bool  # whether the row still has that copy's version
    permit: bool
    connected: bool = False
    pending: int = -1  # an event it has not recorded yet
    seen: int = 0  # epoch in which it last saw nothing there, since its last send


class World(NamedTuple):
    """Everything that can differ between two moments."""

    row: int
    procs: tuple[Process, ...]
    claims: int  # claims, cancels and grants that are still to come
    cancels: int
    grants: int
    wire: tuple[int, ...] = ()  # epochs of the requests under way
    effects: int = 0
    other: bool = False  # the key holds another party's resource
    fence: int = 0
    sent: int = 0
    asked: int = 0
    expired: bool = False
    approvals: int = 0  # still to come
    leaves: int = 0  # approvals given and not used


class Fault(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Bounds:
    """How far the world goes."""

    claims: int
    cancels: int = 1
    grants: int = 1
    dispatches: int = 2
    model_requests: int = 2
    approvals: int = 0


@dataclass(frozen=True)
class Found:
    """What an exploration saw; `faults` maps each broken invariant to the shortest way to it."""

    states: int
    reached: frozenset[State]
    faults: dict[str, list[str]]


class Table:
    """The functions under test over small integers: each (run, event) and each (run, permit, now) is evaluated once.

    Two runs are one when the machine cannot tell them apart: a copy's version matters only by its equality with the
    row's, which `Process.fresh` has, and of an epoch that has passed only that it has passed (it is written as 1).
    """

    def __init__(self, next_step: NextStep, evolve: Evolve, allows: Allows) -> None:
        self._next_step, self._evolve, self._allows = next_step, evolve, allows
        self.runs: list[Run] = []
        self.epochs: list[int] = []
        self.events: list[Event] = []
        self._run_ids: dict[tuple[Any, ...], int] = {}
        self._event_ids: dict[str, int] = {}
        self._known: dict[int, tuple[int, Event]] = {}  # by identity; the event is kept, so its identity stays its own
        self._after: dict[tuple[int, int], int | None] = {}
        self._may: dict[tuple[int, int], bool] = {}
        self._steps: dict[tuple[int, bool, bool], Step] = {}

    def run(self, run: Run) -> int:
        passed = {name: 1 for name in ("asked", "intended", "looked") if 0 < getattr(run, name) < run.epoch}
        run = replace(run, version=1, reason="", owner="", head="", metadata=None, **passed)
        values = [getattr(run, f.name) for f in fields(run) if f.name not in ("id", "contract")]
        key = tuple(canonical(v) if isinstance(v, dict) else v for v in values)
        if key not in self._run_ids:
            self._run_ids[key] = len(self.runs)
            self.runs.append(run)
            self.epochs.append(run.epoch)
        return self._run_ids[key]

    def event(self, event: Event) -> int:
        if id(event) not in self._known:
            key = canonical([event.type, event.detail])
            if key not in self._event_ids:
                self._event_ids[key] = len(self.events)
                self.events.append(event)
            self._known[id(event)] = (self._event_ids[key], event)
        return self._known[id(event)][0]

    def after(self, run: int, event: int) -> int | None:
        """The run after the event; None when the move is illegal."""
        at = (run, event)
        if at not in self._after:
            try:
                self._after[at] = self.run(self._evolve(self.runs[run], self.events[event]))
            except IllegalMove:
                self._after[at] = None
        return self._after[at]

    def allows(self, run: int, event: int) -> bool:
        at = (run, event)
        if at not in self._may:
            self._may[at] = self._allows(self.runs[run], self.events[event])
        return self._may[at]

    def step(self, run: int, permit: bool, expired: bool) -> Step:
        at = (run, permit, expired)
        if at not in self._steps:
            self._steps[at] = self._next_step(self.runs[run], permit, AFTER if expired else BEFORE)
        return self._steps[at]


class Explorer:
    """One server kind, one start, one machine."""

    def __init__(self, fences: bool, deduplicates: bool, blind: bool, bounds: Bounds, table: Table) -> None:
        self.fences, self.deduplicates, self.blind = fences, deduplicates, blind
        self.bounds, self.table = bounds, table
        self._ends: dict[int, bool] = {}
        self._roads: dict[tuple[int, bool, bool, bool], str | None] = {}
        ids = {e: table.event(ANSWERED[e]) for e in ANSWERED}
        self.returned, self.refused = ids[Outcome.RETURNED], ids[Outcome.REFUSED]
        self.unknown, self.unsent = ids[Outcome.UNKNOWN], ids[Outcome.UNSENT]
        self.model_failed = table.event(MODEL_ANSWERS["no answer"])

    def start(self, planned: bool, other: bool) -> World:
        contract = Contract(
            goal=GOAL,
            tool=Tool(name="write", resource="ticket", fences=self.fences, deduplicates=self.deduplicates),
            provider="fixture",
            model="world",
            budget=Budget(dispatches=self.bounds.dispatches, model_requests=self.bounds.model_requests),
            deadline=DEADLINE,
            command="python lab.py",
        )
        run = machine.opened("r", contract, "")[0]
        if planned:
            asked = machine.evolve(run, Event(E.MODEL_REQUESTED, {"request": 1}))
            run = machine.evolve(asked, PLANNED)
        row = self.table.run(run)
        procs = () if planned else (Process(row, fresh=True, permit=True),)
        limits = self.bounds.claims, self.bounds.cancels, self.bounds.grants
        return World(row, procs, *limits, other=other, asked=int(planned), approvals=self.bounds.approvals)

    def normal(self, w: World) -> World:
        """The world without what is over for good, since epoch and fence only grow.

        That is: a process of an older epoch with something to record (`Runs.record` will raise `Fenced`) or with
        nothing left but a decision to record, and a request on the wire that the server will not carry out.
        """
        epochs = self.table.epochs
        for p in w.procs:
            if epochs[p.run] != epochs[w.row] and not self._matters(w, p):
                w = w._replace(procs=tuple(q for q in w.procs if q is not p))
        if w.wire and not all(self._can_land(w, e) for e in w.wire):
            w = w._replace(wire=tuple(e for e in w.wire if self._can_land(w, e)))
        return w

    def _matters(self, w: World, fenced: Process) -> bool:
        if fenced.pending >= 0:
            return False
        match self.table.step(fenced.run, fenced.permit, w.expired):
            case LookUp() | Dispatch():
                return fenced.connected
            case AskModel():
                return True
        return False

    # -- what can happen

    def successors(self, w: World) -> Iterator[tuple[str, World | Fault]]:
        if self.table.runs[w.row].state not in FINAL:
            yield from self._people(w)
        for i, epoch in enumerate(w.wire):
            rest = w._replace(wire=w.wire[:i] + w.wire[i + 1 :])
            yield f"the request of e{epoch} arrives late", self._land(rest, epoch)[0]
            yield f"the request of e{epoch} is lost at last", rest
        for i, p in enumerate(w.procs):
            yield f"process {i} dies", _without(w, i)
            yield from self._act(w, i, p)

    def _people(self, w: World) -> Iterator[tuple[str, World | Fault]]:
        stale = tuple(p._replace(fresh=False) for p in w.procs)
        if w.claims and len(w.procs) < 2:
            row = self._moved(w.row, CLAIMED)
            for permit in (False, True):
                procs = (*stale, Process(row, True, permit))
                yield f"claimed, permit {permit}", w._replace(row=row, procs=procs, claims=w.claims - 1)
        if w.cancels:
            yield "cancel asked", w._replace(row=self._moved(w.row, CANCEL), procs=stale, cancels=w.cancels - 1)
        if w.grants:
            yield "granted one more", w._replace(row=self._moved(w.row, GRANT), procs=stale, grants=w.grants - 1)
        if w.approvals and self.table.runs[w.row].state is State.WAITING_EXECUTION:
            row = self._moved(self._moved(w.row, ASKED), APPROVED)
            yield "approved", w._replace(row=row, procs=stale, approvals=w.approvals - 1, leaves=1)
        if not w.expired:
            yield "the deadline passes", w._replace(expired=True)
        owned = any(self.table.epochs[p.run] == self.table.epochs[w.row] for p in w.procs)
        if self.table.runs[w.row].state is State.RECONCILE_REQUIRED and not owned:
            yield "settled as failed", w._replace(row=self._moved(w.row, SETTLE), procs=stale)

    def _act(self, w: World, i: int, p: Process) -> Iterator[tuple[str, World | Fault]]:
        if p.pending >= 0:
            yield self._record(w, i, p)
            return
        match self.table.step(p.run, p.permit, w.expired):
            case Halt():
                yield f"process {i} leaves", _without(w, i)
            case Decide(event):
                yield f"process {i} decides {event.type}", self._holds(w, i, p, event)
            case AskModel():
                asked = w._replace(asked=w.asked + 1)
                for name, event in MODEL_ANSWERS.items():
                    yield f"process {i} asks the model: {name}", self._holds(asked, i, p, event)
            case LookUp() | Dispatch() if not p.connected:
                yield f"process {i} connects", self._holds(w, i, p._replace(connected=True), CONNECTED)
            case LookUp(_, epoch):
                yield self._look_up(w, i, p, epoch)
            case Dispatch(_, epoch, action):
                yield from self._send(w, i, p, epoch, dict(action))

    def _holds(self, w: World, i: int, p: Process, event: Event) -> World:
        return _with(w, i, p._replace(pending=self.table.event(event)))

    def _record(self, w: World, i: int, p: Process) -> tuple[str, World | Fault]:
        """The rule of `Runs.record` in the epoch of the row: rebased when the version differs. See also `normal`."""
        event, told = self.table.events[p.pending], f"process {i} records {self.table.events[p.pending].type}"
        if not p.fresh and not self.table.allows(w.row, p.pending):
            return f"{told}: dropped", _with(w, i, p._replace(run=w.row, fresh=True, pending=-1))
        row = self.table.after(p.run if p.fresh else w.row, p.pending)
        if row is None:
            return told, Fault(f"the owner could not record {event.type}")
        moved = w._replace(row=row)
        if p.pending == self.model_failed:
            return told, _without(moved, i)
        return told, _with(moved, i, p._replace(run=row, fresh=True, pending=-1))

    def _look_up(self, w: World, i: int, p: Process, epoch: int) -> tuple[str, World]:
        if self.blind:
            return f"process {i} cannot look up", self._holds(w, i, p._replace(seen=epoch), UNKNOWABLE)
        if self.fences:
            w = w._replace(fence=max(w.fence, epoch))
        if w.other:
            return f"process {i} looks up with e{epoch}: another", self._holds(w, i, p, FOUND_OTHER)
        if w.effects:
            return f"process {i} looks up with e{epoch}: found", self._holds(w, i, p, FOUND)
        return f"process {i} looks up with e{epoch}: absent", self._holds(w, i, p._replace(seen=epoch), ABSENT)

    def _send(self, w: World, i: int, p: Process, epoch: int, action: Any) -> Iterator[tuple[str, World | Fault]]:
        told, row = f"process {i} sends e{epoch}", self.table.runs[w.row]
        w = w._replace(sent=w.sent + 1)
        rules = {
            "a dispatch without a permit": p.permit or w.leaves == 1,
            "a dispatch without a look-up in its epoch after the attempt before": p.seen == epoch,
            "more dispatches sent than debited": w.sent <= row.dispatches_spent,
            "a dispatch of something else than the goal": action == GOAL,
            "a dispatch for a key that another resource holds": not w.other,
        }
        if not all(rules.values()):
            yield from ((told, Fault(name)) for name, kept in rules.items() if not kept)
            return
        p, w = p._replace(seen=0), w._replace(leaves=0)
        landed, answer = self._land(w, epoch)
        delayed = w._replace(wire=tuple(sorted((*w.wire, epoch))))
        for how, world, outcome in (
            ("answered", landed, answer),
            ("answer lost", landed, self.unknown),
            ("lost", w, self.unknown),
            ("delayed", delayed, self.unknown),
            ("acknowledged, to land later", delayed, self.returned),
            ("a lie", w, self.returned),
            ("refused cleanly", w, self.refused),
            ("never left", w, self.unsent),
        ):
            yield f"{told}: {how}", _with(world, i, p._replace(pending=outcome))

    def _land(self, w: World, epoch: int) -> tuple[World, int]:
        if self._can_land(w, epoch):
            return w._replace(effects=w.effects + 1), self.returned
        return w, self.refused if self.fences and epoch < w.fence else self.returned

    def _moved(self, run: int, event: Event) -> int:
        after = self.table.after(run, self.table.event(event))
        assert after is not None, f"{event.type} must always be possible here: {self.table.runs[run]}"
        return after

    # -- what must hold

    def faults(self, w: World) -> Iterator[str]:
        run = self.table.runs[w.row]
        if w.effects > 1:
            yield "two effects"
        if run.dispatches_spent > self.bounds.dispatches + self.bounds.grants - w.grants:
            yield "more dispatches debited than allowed"
        if w.asked > run.model_requests_spent or w.asked > self.bounds.model_requests:
            yield "more model requests sent than debited or allowed"
        if run.state in FINAL:
            yield from self._final_faults(w, run)

    def stuck(self, w: World) -> Iterator[str]:
        """Why nobody could take this run further, if no process lives."""
        if not w.procs and self.table.runs[w.row].state not in FINAL:
            fault = self._road(w.row, bool(w.effects), w.other, w.expired)
            yield from [fault] if fault else []

    def _final_faults(self, w: World, run: Run) -> Iterator[str]:
        if not self._absorbs(w.row):
            yield f"{run.state} is not the end"
        if run.settled_by:
            return
        if run.state is State.SUCCEEDED and (w.other or not w.effects):
            yield "succeeded without a resource that equals the goal"
        if run.state is not State.SUCCEEDED and w.effects:
            yield f"{run.state}, and the effect is there"
        if run.state is not State.SUCCEEDED and any(self._can_land(w, epoch) for epoch in self._loose(w)):
            yield f"{run.state}, and the effect can still land"

    def _absorbs(self, row: int) -> bool:
        """Whether nothing is done and nothing can happen, whatever the permit, the time and the event."""
        if row not in self._ends:
            steps = [self.table.step(row, permit, expired) for permit in (False, True) for expired in (False, True)]
            taken = [e for e in range(len(self.table.events)) if self.table.allows(row, e)]
            self._ends[row] = not taken and all(isinstance(step, Halt) for step in steps)
        return self._ends[row]

    def _loose(self, w: World) -> Iterator[int]:
        """The epoch of every request that is under way or that a process is about to send."""
        yield from w.wire
        for p in w.procs:
            step = self.table.step(p.run, p.permit, w.expired) if p.pending < 0 else Halt()
            if isinstance(step, Dispatch):
                yield step.epoch

    def _can_land(self, w: World, epoch: int) -> bool:
        return not (self.fences and epoch < w.fence) and not (self.deduplicates and w.effects)

    def _road(self, row: int, effect: bool, other: bool, expired: bool) -> str | None:
        """Type what the report says, again and again, in a world that is kind: why that does not end, or None."""
        at = (row, effect, other, expired)
        if at not in self._roads:
            self._roads[at] = self._walk(row, effect, other, expired)
        return self._roads[at]

    def _walk(self, row: int, effect: bool, other: bool, expired: bool) -> str | None:
        for permit in (False, True):
            if (rest := self._drive(row, effect, other, expired, permit)[0]) is None:
                return f"a restart from {self.table.runs[row].state} does not come to rest"
            if self.table.runs[rest].state not in FINAL | {State.WAITING_EXECUTION, State.RECONCILE_REQUIRED}:
                return f"a restart comes to rest in {self.table.runs[rest].state}"
        tried = 0
        while self.table.runs[row].state not in FINAL:
            action = next_command(self.table.runs[row], Path("state"))["action"]
            if tried > 6 or action not in {"execute", "resume", "ask_operator", "settle"}:
                return f"in {self.table.runs[row].state} the report says {action!r}, which leads nowhere"
            tried += 1
            if action == "settle":
                row = self._moved(row, SETTLE)
            elif action == "ask_operator":
                row = self._moved(row, GRANT)
            else:
                rest, effect = self._drive(row, effect, other, expired, action == "execute")
                if rest is None:
                    return f"{action!r} from {self.table.runs[row].state} does not come to rest"
                row = rest
        return None

    def _drive(self, row: int, effect: bool, other: bool, expired: bool, permit: bool) -> tuple[int | None, bool]:
        """Restart and go on where every request is answered truly; None when that does not come to rest."""
        at: int | None = self._moved(row, CLAIMED)
        for _ in range(30):
            if at is None:
                break
            match self.table.step(at, permit, expired):
                case Halt():
                    return at, effect
                case Decide(event):
                    happened = event
                case AskModel():
                    happened = PLANNED
                case LookUp():
                    happened = FOUND_OTHER if other else FOUND if effect else ABSENT
                    happened = UNKNOWABLE if self.blind else happened
                case Dispatch():
                    happened, effect = ANSWERED[Outcome.RETURNED], True
            at = self.table.after(at, self.table.event(happened))
        return None, effect


def _without(w: World, i: int) -> World:
    return w._replace(procs=w.procs[:i] + w.procs[i + 1 :])


def _with(w: World, i: int, p: Process) -> World:
    return w._replace(procs=(*w.procs[:i], p, *w.procs[i + 1 :]))


def explore(
    server: str,
    bounds: Bounds,
    *,
    planned: bool = True,
    other: bool = False,
    next_step: NextStep = machine.next_step,
    evolve: Evolve = machine.evolve,
    allows: Allows = machine.allows,
    until: str | None = None,
) -> Found:
    """Visit every state of the world that can be reached; a state with a broken promise is not gone beyond.

    `until` ends the exploration with the first fault whose name holds that text.
    """
    explorer = Explorer(*SERVERS[server], bounds, Table(next_step, evolve, allows))
    first = explorer.start(planned, other)
    back: dict[World, tuple[World, str] | None] = {first: None}
    todo, faults = deque([first]), {}

    def way(w: World) -> list[str]:
        told = []
        while (step := back[w]) is not None:
            w, label = step
            told.append(label)
        return told[::-1]

    while todo and not (until and any(until in name for name in faults)):
        w = todo.popleft()
        broken = list(explorer.faults(w))
        for name in [*broken, *explorer.stuck(w)]:
            if name not in faults:
                faults[name] = way(w)
        if broken:
            continue
        for label, v in explorer.successors(w):
            if isinstance(v, Fault):
                faults.setdefault(str(v), [*way(w), label])
            elif (v := explorer.normal(v)) not in back:
                back[v] = (w, label)
                todo.append(v)
    return Found(len(back), frozenset(explorer.table.runs[w.row].state for w in back), faults)


def _told(found: Found) -> str:
    return "\n".join(f"{name}:\n  " + "\n  ".join(way) for name, way in found.faults.items())


STARTS = {
    "planned": (Bounds(claims=2), {"planned": True}),
    "new": (Bounds(claims=1, grants=0), {"planned": False}),
    "held": (Bounds(claims=2), {"planned": True, "other": True}),
    "approved": (Bounds(claims=2, cancels=0, grants=0, approvals=1), {"planned": True}),
}
LEAST = {"fences, de-duplicates": 80_000, "fences only": 80_000, "de-duplicates only": 180_000, "neither": 45_000}
LEAST |= {"no look-up, de-duplicates": 140_000, "no look-up": 40_000}


@pytest.mark.parametrize("server", SERVERS)
def test_no_interleaving_breaks_the_promise(server: str) -> None:
    """In every reachable state: at most one effect, budgets kept, no untrue outcome, and always a way on."""
    states, reached, told = 0, set(), []
    blind = SERVERS[server][2]
    for start, (bounds, kind) in STARTS.items():
        if blind and kind.get("other"):
            continue  # who cannot look cannot see that another holds the key
        found = explore(server, bounds, **kind)
        states += found.states
        reached |= found.reached
        told.append(f"{start} {found.states}")
        assert not found.faults, f"{server}, from {start}:\n{_told(found)}"
    print(f"{server}: {states} states ({', '.join(told)})")
    assert reached == set(State) - ({State.SUCCEEDED} if blind else set())
    assert states >= LEAST[server]


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
def test_no_interleaving_of_three_claims_breaks_the_promise(server: str) -> None:
    """The same with one more take-over, so that two predecessors in turn leave something behind."""
    found = explore(server, Bounds(claims=3))
    print(f"{server}, three claims: {found.states} states")
    assert not found.faults, _told(found)
    assert found.states >= 4 * LEAST[server]


def _seen_as(change: Callable[[Run], Run]) -> dict[str, Any]:
    """A machine that takes a run for a changed one."""
    return {
        "next_step": lambda run, permit, now: machine.next_step(change(run), permit, now),
        "evolve": lambda run, event: replace(machine.evolve(change(run), event), contract=run.contract),
        "allows": lambda run, event: machine.allows(change(run), event),
    }


def _after(kind: EventType, change: Callable[[Run, Run, Event], Run]) -> dict[str, Any]:
    """A machine that makes something else of one event."""

    def evolve(run: Run, event: Event) -> Run:
        after = machine.evolve(run, event)
        return change(run, after, event) if event.type is kind else after

    return {"evolve": evolve}


def _debiting_late(run: Run, event: Event) -> Run:
    spent = run.dispatches_spent + (event.type is E.DISPATCH_ANSWERED)
    return replace(machine.evolve(run, event), dispatches_spent=spent)


def _unlooked(run: Run) -> Run:
    if run.state in (State.PLANNED, State.RECONCILING):
        return replace(run, state=State.RECONCILING, looked=run.epoch)
    return run


def _fencing(run: Run) -> Run:
    tool = replace(run.contract.tool, fences=True)
    return replace(run, contract=replace(run.contract, tool=tool))


def _is(event: Event, outcome: Outcome) -> bool:
    return event.detail["outcome"] == outcome


MUTANTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "the epoch does not grow after a dispatch": (
        _after(E.DISPATCH_ANSWERED, lambda run, after, e: replace(after, epoch=run.epoch, looked=0)),
        "fences only",
        "the effect can still land",
    ),
    "a take-over does not grow the epoch": (
        _after(E.CLAIMED, lambda run, after, e: replace(after, epoch=run.epoch)),
        "fences only",
        "a dispatch",
    ),
    "a look-up of any epoch is fresh": (
        _seen_as(lambda run: replace(run, looked=run.epoch) if run.looked else run),
        "fences, de-duplicates",
        "a dispatch without a look-up",
    ),
    "the first dispatch needs no look-up": (
        _seen_as(_unlooked),
        "fences, de-duplicates",
        "a dispatch without a look-up",
    ),
    "a restart sends an old intent": (
        _seen_as(lambda run: replace(run, intended=run.epoch) if run.state is State.DISPATCHING else run),
        "de-duplicates only",
        "more dispatches sent than debited",
    ),
    "absent is conclusive without a fence": (_seen_as(_fencing), "neither", "the effect can still land"),
    "an unknown outcome is clean": (
        _after(
            E.DISPATCH_ANSWERED,
            lambda run, after, e: replace(after, doubtful=0) if _is(e, Outcome.UNKNOWN) else after,
        ),
        "neither",
        "the effect can still land",
    ),
    "what nobody can tell is taken for absent": (
        {"evolve": lambda run, e: machine.evolve(replace(run, doubtful=0) if "unknown" in e.detail else run, e)},
        "no look-up",
        "the effect is there",
    ),
    "the debit comes with the answer": (
        {"evolve": _debiting_late},
        "fences, de-duplicates",
        "more dispatches sent than debited",
    ),
    "the write's answer is believed": (
        _after(
            E.DISPATCH_ANSWERED,
            lambda run, after, e: replace(after, state=State.SUCCEEDED) if _is(e, Outcome.RETURNED) else after,
        ),
        "fences, de-duplicates",
        "succeeded without a resource",
    ),
    "a cancel needs no look-up": (
        _after(E.CANCEL_REQUESTED, lambda run, after, e: replace(after, state=State.CANCELLED)),
        "fences, de-duplicates",
        "cancelled, and the effect",
    ),
    "the deadline ends a doubtful run": (
        _after(E.DEADLINE_PASSED, lambda run, after, e: replace(after, state=State.FAILED)),
        "de-duplicates only",
        "failed, and the effect can still land",
    ),
    "the permit is not asked for": (
        {"next_step": lambda run, permit, now: machine.next_step(run, True, now)},
        "fences, de-duplicates",
        "a dispatch without a permit",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_exploration_catches_a_machine_with_a_fault(name: str) -> None:
    """Each protection of the machine is needed: without it the exploration finds a broken promise and the way to it."""
    changed, server, expected = MUTANTS[name]
    found = explore(server, Bounds(claims=2), **changed, until=expected)
    ways = {fault: way for fault, way in found.faults.items() if expected in fault}
    for fault, way in ways.items():
        print(f"{name}, {server}: after {found.states} states, {fault}:\n  " + "\n  ".join(way))
    assert ways, found.faults
