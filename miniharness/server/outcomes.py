"""What became of each operation, in the author's own database: its outcome, its fence, and the one rule for a write.

An operation is one transaction: the fence's check, the author's effect and the outcome, all of it or nothing. Knows no
MCP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from miniharness.contract import canonical
from miniharness.errors import HarnessError
from miniharness.server import databases

if TYPE_CHECKING:
    from miniharness.server.databases import Execute, Transaction

TABLES = (
    "create table if not exists operation_fences (operation_key text not null primary key, epoch bigint not null)",
    "create table if not exists operation_outcomes (operation_key text not null primary key,"
    " tool text not null, arguments text not null, result text not null)",
)
"""They are SQL for SQLite and for Postgres."""


class Refused(HarnessError):
    """The write certainly did not happen; raise it in a tool to say so."""

    code = "refused"


class Conflict(Refused):
    """The key already holds another operation."""

    code = "conflict"


class Stale(Refused):
    """A newer attempt has looked the key up; this one comes too late."""

    code = "stale"


def raise_fence(execute: Execute, key: str, epoch: int) -> None:
    """No write of that key with a lower epoch, or without one, is accepted from the end of this transaction on."""
    execute(
        "insert into operation_fences (operation_key, epoch) values (?, ?) on conflict (operation_key)"
        " do update set epoch = excluded.epoch where operation_fences.epoch < excluded.epoch",
        (key, epoch),
    )


def check_fence(execute: Execute, key: str, epoch: int | None) -> None:
    """Let a write pass, within its own transaction.

    Raises:
        Stale: a fence stands for the key, and `epoch` is below it or missing.
    """
    row = execute("select epoch from operation_fences where operation_key = ?", (key,)).fetchone()
    if row and (epoch is None or epoch < row[0]):
        said = "without an epoch" if epoch is None else f"of epoch {epoch}"
        raise Stale(f"operation {key} is fenced at epoch {row[0]}; this write {said} comes too late")


@dataclass(frozen=True, slots=True)
class Operation:
    """What a request asks for: this tool with these arguments, once under this key, by the attempt of this epoch."""

    key: str
    tool: str
    arguments: Mapping[str, Any]
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done under a key. `replayed` tells that it was done before, not now."""

    tool: str
    arguments: Mapping[str, Any]
    result: Any
    replayed: bool = False


class Outcomes:
    """The outcomes and fences beside the author's own tables, which are made if they are not there.

    `connect` opens a connection of `sqlite3` (with `check_same_thread=False`) or of psycopg 3. Connections are used by
    one operation at a time, of any thread, and for nothing else.

    Raises:
        the database's own errors, from every method: unless it is the commit that failed, nothing happened.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._database = databases.over(connect)
        with self._database.transaction("") as transaction:
            for statement in TABLES:
                transaction.execute(statement, ())

    def close(self) -> None:
        """Close the connections."""
        self._database.close()

    def once(self, operation: Operation, effect: Callable[[Any], Any]) -> Outcome:
        """Do the operation, or return what it did when it was done. On disk when it returns.

        `effect` gets the connection, in the transaction, which it must not end, and returns the result, a JSON value.
        When it raises, nothing happened, unless it committed by SQL text in Postgres, which only it can prevent.

        Raises:
            Conflict: the key holds another tool or other arguments.
            Stale: a fence stands for the key, and the operation's epoch is below it or missing.
        """
        arguments = canonical(operation.arguments)
        with self._database.transaction(operation.key) as transaction:
            check_fence(transaction.execute, operation.key, operation.epoch)
            if done := _find(transaction, operation.key):
                if other := _differences(done, operation):
                    said = f"operation {operation.key} already holds another {' and '.join(other)}; take a new key"
                    raise Conflict(said)
                return replace(done, replayed=True)
            result = transaction.perform(effect)
            transaction.execute(
                "insert into operation_outcomes (operation_key, tool, arguments, result) values (?, ?, ?, ?)",
                (operation.key, operation.tool, arguments, canonical(result)),
            )
        return Outcome(operation.tool, operation.arguments, result)

    def look_up(self, key: str, epoch: int | None = None) -> Outcome | None:
        """What was done under that key, or None; with an epoch, no write of a lower one is accepted from now on.

        None without an epoch says nothing of writes that are still on their way.
        """
        with self._database.transaction(key) as transaction:
            if epoch is not None:
                raise_fence(transaction.execute, key, epoch)
            return _find(transaction, key)


def _find(transaction: Transaction, key: str) -> Outcome | None:
    asked = "select tool, arguments, result from operation_outcomes where operation_key = ?"
    row: Sequence[str] | None = transaction.execute(asked, (key,)).fetchone()
    return Outcome(row[0], json.loads(row[1]), json.loads(row[2])) if row else None


def _differences(done: Outcome, operation: Operation) -> list[str]:
    """The names of what differs: the tool, or arguments. Their values are not for whoever asks."""
    if done.tool != operation.tool:
        return ["tool"]
    was, now = _texts(done.arguments), _texts(operation.arguments)
    return [name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)]


def _texts(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Each as JSON text, in which 1, 1.0 and true are three values."""
    return {name: canonical(value) for name, value in arguments.items()}
