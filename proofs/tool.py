"""The world of a trial: the lab's own ticket server, with its tool as it is or made worse, and every call counted.

`keyed` is the server as it is. In the `plain` world every accepted write adds a row: nothing but the harness stands
between a repeated dispatch and a second ticket.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import server
import store
from miniharness.contract import canonical
from miniharness.errors import StoreError, UsageError
from miniharness.server.outcomes import check_fence
from proofs.accident import Notes, Watch

T = TypeVar("T")

ANSWERED = "-- answer"
AFTER = {"error-after": StoreError, "broken-after": RuntimeError, "refused-after": UsageError}
FAULTS = ("lies", *AFTER, "late-after-look-up", "late-before-look-up")
"""How the tool is faulty: it reports success and wrote nothing; it wrote, and answers an error (`store`: nobody knows;
an exception; `invalid`: declared to mean that nothing was written); its write comes late."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The tool's fault, for its first `times` calls."""

    name: str
    times: int


def install(watch: Watch, notes: Notes, plain: bool, fault: Fault | None) -> None:
    """Make this process's ticket server the one of the trial."""

    class World(store.Tickets):
        after: Exception | None = None
        written = False

        async def together(self, work: Callable[[], T]) -> T:
            """As the store does it, and then answer as the fault says: everything is on disk by then."""
            self.after, self.written = None, False
            done = await super().together(work)
            if self.written:
                watch.after(ANSWERED, watch.before(ANSWERED))
            if self.after:
                raise self.after
            return done

        def create(self, op: str, action: Mapping[str, str], epoch: int | None = None) -> store.Ticket:
            notes.add(call=op, epoch=epoch)
            if fault and len(notes.read("call")) <= fault.times:
                if fault.name == "lies":
                    return store.Ticket(id=1, action=store.Action(**action))
                if fault.name.startswith("late"):
                    notes.add(late=op, action=dict(action), epoch=epoch)
                    raise StoreError("it stands in a queue")
                self.after = AFTER[fault.name]("it broke after the write")
            ticket = self._write(op, action, epoch)
            self.written = True
            return ticket

        def _write(self, op: str, action: Mapping[str, str], epoch: int | None) -> store.Ticket:
            if not plain:
                return super().create(op, action, epoch)
            with self._db.transaction():
                check_fence(self._db.execute, op, epoch)
                values = {"op": op, "payload": canonical(action)}
                number = self._db.execute("insert into tickets (op, payload) values (:op, :payload)", values).lastrowid
                return store.Ticket(id=number or 0, action=store.Action(**action))

        def look_up(self, op: str, epoch: int | None = None) -> store.Ticket | None:
            if fault and fault.name == "late-before-look-up":
                self._deliver()
            found = super().look_up(op, epoch)
            if fault and fault.name == "late-after-look-up":
                self._deliver()
            return found

        def _deliver(self) -> None:
            """The late writes arrive, each once, with the epoch that they were sent with."""
            for late in notes.read("late")[len(notes.read("delivered")) :]:
                notes.add(delivered=late["late"])
                with suppress(store.Refused):
                    self._write(late["late"], late["action"], late["epoch"])

    server.Tickets = World  # type: ignore[attr-defined]
    if plain:
        made, *changed = store.MIGRATIONS
        store.MIGRATIONS = (made.replace("op text not null unique", "op text not null"), *changed)


def tickets(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Every ticket of the world, `(op, payload)`, from its own file; none when there is no such file or table."""
    path = folder / "tickets.sqlite"
    if not path.exists():
        return []
    with closing(sqlite3.connect(path)) as connection:
        if not connection.execute("select 1 from sqlite_schema where name = 'tickets'").fetchone():
            return []
        return [(op, json.loads(payload)) for op, payload in connection.execute("select op, payload from tickets")]
