"""The two stores of the ticket lab. `Tickets` is the tool server's; `Runs`, the engine's journal, is passed on.

They are two files on purpose: no local transaction can join them, and that gap is what the lab is about.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from miniharness.check import describe, differences
from miniharness.contract import canonical
from miniharness.database import Database
from miniharness.runs import Runs
from miniharness.server.outcomes import Conflict, Refused, Stale, check_fence, raise_fence

__all__ = ["Action", "Conflict", "Found", "Refused", "Runs", "Stale", "Ticket", "Tickets"]

T = TypeVar("T")

APPLICATION_ID = 0x4D48_5401  # "MHT" and 1

MIGRATIONS = (
    """
    create table tickets (
      id integer primary key,
      op text not null unique,
      payload text not null
    ) strict;
    create table fences (
      op text primary key,
      epoch integer not null
    ) strict, without rowid;
    """,
    """
    alter table fences rename to operation_fences;
    alter table operation_fences rename column op to operation_key;
    """,
)


class _Exact(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Action(_Exact):
    """What a ticket says."""

    source: str
    title: str


class Ticket(_Exact):
    """A ticket as the server has it."""

    id: int
    action: Action


class Problem(_Exact):
    """Why a call was not done."""

    code: str
    message: str


class Found(_Exact):
    """The answer of both tools: the ticket of that operation key, if there is one, or what went wrong.

    An error is told in the same schema, for some clients check that of errors, too.
    """

    ticket: Ticket | None
    error: Problem | None = None


class Tickets:
    """Tickets by operation key, with a fence for each key. Each method is one transaction.

    Raises:
        StoreError: from any method, when the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._db = Database(path, APPLICATION_ID, MIGRATIONS)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def look_up(self, op: str, epoch: int | None = None) -> Ticket | None:
        """The ticket of that key, or None; with an epoch, no write of a lower one is accepted from now on."""
        if epoch is None:
            return self._get(op)
        with self._db.transaction():
            raise_fence(self._db.execute, op, epoch)
            return self._get(op)

    async def together(self, work: Callable[[], T]) -> T:
        """What `work` returns, done in a transaction that all share who ask at this moment; on disk when it returns.

        `work` is one call of another method, so that a refusal of it is its own.
        """
        return await self._db.write(work)

    def create(self, op: str, action: Mapping[str, Any], epoch: int | None = None) -> Ticket:
        """Create the ticket of that key, or return the one that already says the same. On disk when it returns.

        Raises:
            Conflict: the key holds another action; names each field that differs.
            Stale: a fence stands for the key, and `epoch` is below it or missing.
        """
        with self._db.transaction():
            check_fence(self._db.execute, op, epoch)
            if ticket := self._get(op):
                if other := differences(ticket.action.model_dump(), action):
                    raise Conflict(f"operation {op} already holds another ticket: {describe(other)}")
                return ticket
            values = {"op": op, "payload": canonical(action)}
            self._db.execute("insert into tickets (op, payload) values (:op, :payload)", values)
            ticket = self._get(op)
            assert ticket is not None
            return ticket

    def _get(self, op: str) -> Ticket | None:
        row = self._db.execute("select id, payload from tickets where op = ?", (op,)).fetchone()
        return Ticket(id=row[0], action=Action(**json.loads(row[1]))) if row else None
