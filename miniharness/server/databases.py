"""A transaction on the author's own connection: sqlite3 and psycopg 3, and all that differs between the two."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Execute = Callable[[str, Sequence[Any]], Any]
"""Runs one statement with `?` for its values and returns the cursor, which gives rows as tuples."""

OPEN = "a transaction is open on the connection; leave it to the operations"
ENDED = "the effect has ended its transaction; nothing of it may stand without its outcome"
IDLE = 0  # psycopg.pq.TransactionStatus.IDLE


@dataclass(frozen=True, slots=True)
class Transaction:
    """An open transaction. `perform` runs the author's part in it, which cannot end it."""

    execute: Execute
    perform: Callable[[Callable[[Any], T]], T]


class Database(Protocol):
    """Transactions of one key happen one after the other, in whatever process."""

    def transaction(self, key: str) -> AbstractContextManager[Transaction]:
        """A transaction on that key: all of it is on disk when the block ends, or nothing when it raises."""

    def close(self) -> None:
        """Close the connections."""


def over(connect: Callable[[], Any]) -> Database:
    """The database that `connect` opens, which is asked at once."""
    connection = connect()
    return SQLite(connection) if isinstance(connection, sqlite3.Connection) else Postgres(connect, connection)


class SQLite:
    """One connection and one turn: SQLite has one writer at a time, so a key needs no lock of its own."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        if not connection.in_transaction:
            connection.isolation_level = "DEFERRED"  # what follows a lost transaction is not committed
        self._connection = connection
        self._turn = threading.Lock()

    @contextmanager
    def transaction(self, key: str) -> Iterator[Transaction]:
        """As `Database` has it."""
        with self._turn:
            if self._connection.in_transaction:
                raise RuntimeError(OPEN)
            self._connection.execute("begin immediate")
            try:
                yield Transaction(self._execute, self._perform)
                self._connection.execute("commit")  # on disk from here on
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("rollback")
                raise

    def _execute(self, sql: str, values: Sequence[Any]) -> sqlite3.Cursor:
        cursor = self._connection.cursor()
        cursor.row_factory = None
        return cursor.execute(sql, values)

    def _perform(self, effect: Callable[[Any], T]) -> T:
        self._connection.set_authorizer(_leave_the_transaction)
        try:
            result = effect(self._connection)
        finally:
            self._connection.set_authorizer(None)
        if not self._connection.in_transaction:  # SQLite itself may have rolled it back
            raise RuntimeError(ENDED)
        return result

    def close(self) -> None:
        """Close the connection."""
        with self._turn:
            self._connection.close()


def _leave_the_transaction(action: int, *_: object) -> int:
    """Denies `begin`, `commit` and `rollback`, so that an effect is never on disk without its outcome."""
    return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_TRANSACTION else sqlite3.SQLITE_OK


class Postgres:
    """As many connections as operations run at once. Those of one key wait for each other by an advisory lock."""

    def __init__(self, connect: Callable[[], Any], connection: Any) -> None:
        self._connect = connect
        self._idle = [connection]

    @contextmanager
    def transaction(self, key: str) -> Iterator[Transaction]:
        """As `Database` has it."""
        connection = self._taken()
        try:
            if connection.info.transaction_status != IDLE:
                raise RuntimeError(OPEN)
            execute = _executing(connection)
            with connection.transaction():  # psycopg refuses its methods to end it, but not the words in SQL
                # each statement must see what was committed while we waited for the lock
                execute("set transaction isolation level read committed", ())
                execute("select pg_advisory_xact_lock(hashtextextended('operation ' || ?, 0))", (key,))
                yield Transaction(execute, lambda effect: _whole(connection, execute, effect))
        finally:
            if connection.info.transaction_status == IDLE:
                self._idle.append(connection)
            else:
                connection.close()

    def _taken(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    def close(self) -> None:
        """Close the connections that are not in use."""
        while self._idle:
            self._idle.pop().close()


def _whole(connection: Any, execute: Execute, effect: Callable[[Any], T]) -> T:
    before = execute("select txid_current()", ()).fetchone()
    result = effect(connection)
    if execute("select txid_current()", ()).fetchone() != before:
        raise RuntimeError(ENDED)
    return result


def _executing(connection: Any) -> Execute:
    from psycopg.rows import tuple_row

    return lambda sql, values: connection.cursor(row_factory=tuple_row).execute(sql.replace("?", "%s"), values)
