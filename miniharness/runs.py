"""Runs: the journal. Each run is one row and its append-only, hash-chained events; the only file with run SQL.

Knows no tool and no model; what an event does to a run is the machine's business.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from miniharness import owner
from miniharness.check import differences
from miniharness.contract import Contract, canonical, check_identifier, digest
from miniharness.database import Database
from miniharness.errors import ContractMismatch, Fenced, HarnessError, RunBusy, StoreError, UsageError
from miniharness.machine import FINAL, Event, EventType, Outcome, Run, State, allows, evolve, opened

PRUNED_AT_ONCE = 500  # so that writers wait for milliseconds only
APPLICATION_ID = 0x4D48_5201  # "MHR" and 1, so that no other program's file is taken for ours

MIGRATIONS = (
    f"""
    create table runs (
      id text primary key,
      contract text not null,
      state text not null check (state in ({", ".join(f"'{s}'" for s in State)})),
      reason text not null,
      version integer not null,
      epoch integer not null,
      owner text not null,
      dispatches_spent integer not null check (dispatches_spent between 0 and dispatches_limit),
      dispatches_limit integer not null,
      model_requests_spent integer not null,
      asked integer not null,
      intended integer not null,
      looked integer not null,
      doubtful integer not null,
      last text not null check (last in ({", ".join(f"'{o}'" for o in Outcome)})),
      refusal text not null,
      cancel integer not null,
      settled_by text,
      proposal text,
      metadata text,
      resource text,
      head text not null
    ) strict, without rowid;
    create index runs_by_state on runs (state, id);
    create table events (
      run text not null references runs (id) deferrable initially deferred,
      seq integer not null,
      at integer not null,
      epoch integer not null,
      type text not null,
      detail text not null,
      digest text not null,
      primary key (run, seq)
    ) strict, without rowid;
    """,
    "alter table runs add column pruned integer not null default 0",
    "alter table runs add column ended_at integer not null default 0",
    "alter table runs add column approval text",
)

_COLUMNS = tuple(f.name for f in fields(Run))
_JSON = {"proposal", "metadata", "resource", "approval"}
_SELECT = f"select {', '.join(_COLUMNS)} from runs"
_INSERT = f"insert into runs ({', '.join(_COLUMNS)}) values ({', '.join(':' + c for c in _COLUMNS)})"


_APPEND = "insert into events values (?, ?, ?, ?, ?, ?, ?)"


@cache
def _update(columns: tuple[str, ...]) -> str:
    """The compare-and-set that moves a run by changing `columns`."""
    changes = ", ".join(f"{c} = :{c}" for c in columns)
    return f"update runs set {changes} where id = :id and version = :was_version and epoch = :was_epoch"


def _to_column(name: str, value: Any) -> Any:
    """A field of a run as SQLite keeps it."""
    if name in _JSON:
        return None if value is None else canonical(value)
    if isinstance(value, StrEnum):
        return value.value
    return canonical(value.plain()) if name == "contract" else value


def _to_row(run: Run) -> dict[str, Any]:
    return {c: _to_column(c, getattr(run, c)) for c in _COLUMNS}


def _changes(before: Run, after: Run) -> dict[str, Any]:
    """The columns in which two versions of a run differ; what is unchanged is the very same object in both."""
    old, new = vars(before), vars(after)
    return {c: _to_column(c, new[c]) for c in _COLUMNS if new[c] is not old[c]}


def _from_row(row: tuple[Any, ...]) -> Run:
    values = dict(zip(_COLUMNS, row, strict=True))
    values |= {c: None if values[c] is None else json.loads(values[c]) for c in _JSON}
    return Run(
        **values
        | {
            "contract": Contract.of(json.loads(values["contract"])),
            "state": State(values["state"]),
            "last": Outcome(values["last"]),
            "cancel": bool(values["cancel"]),
            "pruned": bool(values["pruned"]),
        }
    )


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event as it stands in the history. `at` is in milliseconds since 1970 and orders nothing; `seq` does."""

    seq: int
    at: int
    epoch: int
    type: EventType
    detail: Mapping[str, Any]
    digest: str

    def chained(self, run_id: str, previous: str, detail: str) -> str:
        """The digest this event must carry when it follows the one with digest `previous`: SHA-256 of a JSON list.

        `detail` is the canonical JSON of the event's own.
        """
        return digest(f'["{previous}","{run_id}",{self.seq},{self.at},{self.epoch},"{self.type.value}",{detail}]')


class Runs:
    """The journal in `folder/runs.sqlite`.

    Raises:
        StoreError: from any method, when the file cannot be used; what was committed is untouched.
        UsageError: `folder` cannot be a state folder.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--state-dir {folder} cannot be used as a folder: {error.strerror}; choose another"
            ) from error
        self.folder = folder.absolute()  # a later change of the working directory must not move it
        self._db = Database(self.folder / "runs.sqlite", APPLICATION_ID, MIGRATIONS)
        self._clock = clock
        self._owner: owner.Owner | None = None
        self._driven: set[str] = set()

    def close(self) -> None:
        """Close the file and stop owning anything."""
        self._db.close()
        if self._owner:
            self._owner.release()

    # -- reading

    def get(self, run_id: str) -> Run | None:
        """The run as its row has it, or None.

        Raises:
            UsageError: `run_id` cannot name a run.
        """
        check_identifier(run_id)
        row = self._db.execute(f"{_SELECT} where id = ?", (run_id,)).fetchone()
        with self._readable(run_id):
            return _from_row(row) if row else None

    @contextmanager
    def _readable(self, run_id: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, KeyError, UsageError) as error:
            said = f"{self._db.path}: what is stored of run {run_id} is damaged; keep the file and restore a backup"
            raise StoreError(f"{said} ({type(error).__name__})") from error

    def require(self, run_id: str) -> Run:
        """The run as its row has it.

        Raises:
            UsageError: there is none of that name.
        """
        if run := self.get(run_id):
            return run
        raise UsageError(f"there is no run {run_id!a} in {self.folder}; `runs` lists what is there")

    def all(self, state: State | None = None) -> Iterator[Run]:
        """Every run, or those in one state, by id."""
        where = "where state = :state" if state else ""
        for row in self._db.execute(f"{_SELECT} {where} order by id", {"state": state}):
            with self._readable(row[0]):
                run = _from_row(row)
            yield run

    def events(self, run_id: str) -> list[Recorded]:
        """The whole history of a run, oldest first, as it stands; `replay` proves it."""
        return self._history("run = :run", run=run_id)

    def recorded(self, kind: EventType, within: str | None = None) -> list[Recorded]:
        """All events of one type, of the runs `WITHIN.NAME` or of every run, by run and oldest first."""
        where = " and run > :within || '.' and run < :within || '/'" if within else ""  # a slash follows a dot
        return self._history(f"type = :kind{where}", kind=kind.value, within=within)

    def _history(self, where: str, **values: str | None) -> list[Recorded]:
        sql = f"select run, seq, at, epoch, type, detail, digest from events where {where} order by run, seq"
        events = []
        for run_id, seq, at, epoch, kind, detail, chained in self._db.execute(sql, values).fetchall():
            with self._readable(run_id):
                events.append(Recorded(seq, at, epoch, EventType(kind), json.loads(detail), chained))
        return events

    def driven_elsewhere(self, run: Run) -> bool:
        """Whether another process that lives has claimed `run`, and the run has not ended."""
        mine = self._owner is not None and run.owner == self._owner.name
        return run.state not in FINAL and not mine and owner.is_alive(self._owners, run.owner)

    @property
    def _owners(self) -> Path:
        return self.folder / "owners"

    # -- writing

    async def open(self, run_id: str, contract: Contract, take_over: bool = False) -> Run:
        """Create the run or claim the stored one, so that this process may drive it; a finished one is only returned.

        On disk when it returns: the run with this process as its owner, in a new epoch.

        Raises:
            UsageError: `run_id` cannot name a run.
            ContractMismatch: the id stands for another contract; each field that differs is named.
            RunBusy: a living process owns the run, and `take_over` is false.
        """
        run = self.get(run_id)
        if run and run.state in FINAL:
            refuse_other(run, contract)
            return run
        if run_id in self._driven and not take_over:
            raise _busy(run_id, self._me)
        self._driven.add(run_id)
        try:
            run = await self._write(lambda: self._create_or_claim(run_id, contract, take_over))
        except BaseException:
            self._driven.discard(run_id)
            raise
        if run.state in FINAL:
            self.leave(run)
        return run

    def _create_or_claim(self, run_id: str, contract: Contract, take_over: bool) -> Run:
        run = self.get(run_id)
        if run is None:
            run, first = opened(run_id, contract, self._me)
            run, row = self._stamped(run, "", self._timed(first))
            self._db.execute(_INSERT, _to_row(run))
            self._db.execute(_APPEND, row)
            return run
        refuse_other(run, contract)
        if run.state in FINAL:
            return run
        if self.driven_elsewhere(run) and not take_over:
            raise _busy(run_id, run.owner)
        return self._advance(run, Event(EventType.CLAIMED, {"owner": self._me, "forced": take_over}))

    @property
    def _me(self) -> str:
        try:
            self._owner = self._owner or owner.Owner(self._owners)
        except OSError as error:
            raise StoreError(f"{self._owners} cannot hold a lock file ({error.strerror})") from error
        return self._owner.name

    def leave(self, run: Run) -> None:
        """This process no longer drives `run`."""
        self._driven.discard(run.id)

    async def record(self, run: Run, event: Event) -> Run:
        """Append `event` to the history of `run`; on disk when it returns.

        If an operator's request was written in between, the event is applied to the row as it now stands; when that
        no longer allows it, it is dropped and the row comes back as it is, for the machine to look at again.

        Raises:
            Fenced: another process has taken the run over.
            IllegalMove: the state does not allow the event.
        """
        return await self._write(lambda: self._record(run, event))

    async def _write(self, work: Callable[[], Run]) -> Run:
        """Write together with the other runs that this process drives; a lone run has nobody to wait for."""
        if len(self._driven) > 1:
            return await self._db.write(work)
        with self._db.transaction():
            return work()

    def _record(self, run: Run, event: Event) -> Run:
        try:
            return self._advance(run, event)
        except Fenced:
            stored = self.require(run.id)
            if stored.epoch != run.epoch:
                raise
        return self._advance(stored, event) if allows(stored, event) else stored

    def request(self, run_id: str, event: Event, *, while_driven: bool) -> Run:
        """Append an operator's event to the run, whoever drives it. On disk when it returns.

        Raises:
            UsageError: there is no such run.
            RunBusy: a living process drives it and `while_driven` is false.
            IllegalMove: the run's state does not allow the event.
        """
        with self._db.transaction():
            run = self.require(run_id)
            if not while_driven and (run_id in self._driven or self.driven_elsewhere(run)):
                raise _busy(run_id, run.owner)
            return self._advance(run, event)

    def _advance(self, run: Run, event: Event) -> Run:
        """Move the run, if the row still is what `run` says; nothing was written when this raises a refusal."""
        event = self._timed(event)
        after, row = self._stamped(evolve(run, event), run.head, event)
        changes = _changes(run, after)
        was = {"id": run.id, "was_version": run.version, "was_epoch": run.epoch}
        if self._db.execute(_update(tuple(changes)), changes | was).rowcount != 1:
            raise Fenced(f"run {run.id} was taken over by another process; this one has stopped")
        self._db.execute(_APPEND, row)
        return after

    def _timed(self, event: Event) -> Event:
        return Event(event.type, event.detail, int(self._clock() * 1000))

    def _stamped(self, run: Run, previous: str, event: Event) -> tuple[Run, tuple[Any, ...]]:
        """The run with the digest of its newest event, and that event's row."""
        bare = Recorded(run.version, event.at, run.epoch, event.type, event.detail, "")
        detail = canonical(event.detail)
        head = bare.chained(run.id, previous, detail)
        row = (run.id, bare.seq, bare.at, bare.epoch, event.type.value, detail, head)
        return run.but(head=head), row

    def prune(self, before: float) -> int:
        """Remove the history of runs that ended before that moment (seconds since 1970), and give the space back.

        What stays is the row: contract, verdict, resource and the chain's head. A run that has not ended is never
        touched, nor one that a person settled while its write may still land. Returns how many were pruned.
        """
        total, after = 0, ""
        while ids := self._prunable(int(before * 1000), after):
            total, after = total + len(ids), ids[-1]
            with self._db.transaction():
                for run_id in ids:
                    self._db.execute("delete from events where run = ?", (run_id,))
                    self._db.execute(
                        "update runs set pruned = 1, proposal = null, metadata = null where id = ?", (run_id,)
                    )
        self._db.compact()
        return total

    def _prunable(self, before_ms: int, after: str) -> list[str]:
        final = ", ".join(f"'{state}'" for state in sorted(FINAL))
        rows = self._db.execute(
            "select r.id from runs r join events e on e.run = r.id and e.seq = r.version"
            f" where r.id > ? and r.state in ({final}) and e.at < ? and (r.settled_by is null or r.doubtful = 0)"
            f" order by r.id limit {PRUNED_AT_ONCE}",
            (after, before_ms),
        )
        return [row[0] for row in rows]

    # -- proving

    def replay(self, run_id: str) -> list[str]:
        """Fold the history again and compare it with the row; returns every fault found, none when they agree."""
        run, events = self.require(run_id), self.events(run_id)
        if run.pruned:
            return []  # nothing is left that could disagree
        if not events:
            return ["there are no events"]
        faults = chain_faults(run, events)
        folded: Run | None = None
        for event in events:
            try:
                folded = _fold(folded, run_id, event)
            except (HarnessError, KeyError, TypeError, ValueError) as error:
                return [*faults, f"event {event.seq} ({event.type}) cannot be replayed: {error}"]
        assert folded
        row, again = _to_row(run), _to_row(folded.but(head=events[-1].digest))
        return faults + [f"column {c} is {row[c]!r}, the history gives {again[c]!r}" for c in row if row[c] != again[c]]


def chain_faults(run: Run, events: Sequence[Recorded]) -> list[str]:
    """What shows that `events` are not the history that was written for `run`; nothing when they are."""
    faults: list[str] = []
    head = ""
    for number, event in enumerate(events, start=1):
        if event.seq != number:
            return [*faults, f"event {number} is missing"]
        if event.digest != event.chained(run.id, head, canonical(event.detail)):
            faults.append(f"event {number} ({event.type}) was altered: its digest does not match")
        head = event.digest
    if len(events) < run.version:
        return [*faults, f"{run.version - len(events)} events are missing"]
    return faults if head == run.head else [*faults, "the row has another head than the history"]


def _busy(run_id: str, owner_name: str) -> RunBusy:
    return RunBusy(
        f"run {run_id} is being driven by process {owner.pid_of(owner_name)}, which is alive; wait for it"
        " (or, if it is frozen, add --take-over: it will be refused when it thaws)"
    )


def refuse_other(run: Run, contract: Contract) -> None:
    """Check that the stored run stands for that contract.

    Raises:
        ContractMismatch: it does not; each field that differs is named.
    """
    stored, asked = run.contract.fields(), contract.fields()
    if other := differences(asked, stored):
        told = "; ".join(f"{name} is {d['wanted']!r}, not {d['found']!r}" for name, d in other.items())
        said = f"run {run.id} already stands for another contract: {told}. "
        if run.dispatches_spent and run.state not in FINAL:
            said += f"It is {run.state} and may have written: go on with what it was opened with, or settle it; "
            raise ContractMismatch(f"{said}another run id would be another write")
        raise ContractMismatch(f"{said}Choose another --run")


def _fold(run: Run | None, run_id: str, event: Recorded) -> Run:
    if run is None:
        contract = Contract.of(event.detail["contract"])
        return opened(run_id, contract, event.detail["owner"])[0]
    return evolve(run, Event(event.type, event.detail, event.at))
