"""One SQLite file: opened safely, migrated, used one transaction at a time, and every failure of it one clear error.

Those who write at the same moment share a transaction (`write`). Knows no table. `Runs` and the lab's `Tickets` each
own one.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from miniharness.errors import HarnessError, StoreError

if TYPE_CHECKING:
    from asyncio import Future

BUSY_TIMEOUT_S = 5.0
BUSY_PAUSE_S = 0.004  # SQLite's own waits grow to 100 ms, so with many writers the unlucky one starves
QUIET_TURNS = 4  # messages that arrived together reach `write` one after the other, a few turns of the loop apart
LOOK_AGAIN_S = (0.02, 0.2, 0.0)

T = TypeVar("T")

_ADVICE = {
    sqlite3.SQLITE_BUSY: "another program holds it locked; end that program, then run the same command again",
    sqlite3.SQLITE_LOCKED: "another program holds it locked; end that program, then run the same command again",
    sqlite3.SQLITE_FULL: "the disk is full; make room, then run the same command again",
    sqlite3.SQLITE_IOERR: "the disk failed or is full; make room or mend it, then run the same command again",
    sqlite3.SQLITE_READONLY: "it cannot be written; make it and its folder writable, then run the same command again",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; check the folder and its permissions",
    sqlite3.SQLITE_CORRUPT: "it is damaged; keep it as it is and restore a backup",
    sqlite3.SQLITE_NOTADB: "it is not a SQLite database; keep it as it is and restore a backup, or use another folder",
}


class Database:
    """An open SQLite file in WAL mode with `synchronous=full`: what is committed survives a power loss.

    `migrations` is append-only; the position of the last one applied is the file's `user_version`. Use it from one
    thread at a time.

    Raises:
        StoreError: the file is damaged, locked, unwritable, of another program, or newer than this code. It is then
            left exactly as it was.
    """

    def __init__(self, path: Path, application_id: int, migrations: Sequence[str]) -> None:
        self.path = path
        self._waiting: list[tuple[Callable[[], Any], Future[Any]]] = []
        with self._clear_errors():
            if path.is_file():
                self._look_first(application_id, len(migrations))
            self._connection = sqlite3.connect(path, timeout=0, isolation_level=None)
            try:
                self._refuse_foreign(self._patiently, application_id, len(migrations))
                self._patiently("pragma journal_mode = wal")
                self._patiently("pragma synchronous = full")
                self._patiently("pragma foreign_keys = on")
                if self.version < len(migrations):
                    self._migrate(application_id, migrations)
            except BaseException:
                self._connection.close()
                raise

    def _look_first(self, application_id: int, known: int) -> None:
        """Look at the file without changing a byte of it, not even by tidying up after a killed process.

        One that another process is making just now can look like anything for a moment: it is looked at again before
        it is refused.
        """
        for pause_s in LOOK_AGAIN_S:
            try:
                with closing(_read_only(self.path)) as connection:
                    self._refuse_foreign(connection.execute, application_id, known)
                return
            except (sqlite3.DatabaseError, StoreError) as error:
                if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_ROLLBACK:
                    return  # one was killed while making the file, and only a writer can take that back
                if not pause_s or _primary_code(error) == sqlite3.SQLITE_BUSY:
                    raise
            time.sleep(pause_s)

    def _refuse_foreign(self, execute: Callable[[str], sqlite3.Cursor], application_id: int, known: int) -> None:
        execute("begin")  # one snapshot: another process may be making the file just now
        version, owner = _pragma(execute, "user_version"), _pragma(execute, "application_id")
        tables = execute("select count(*) from sqlite_schema").fetchone()[0]
        execute("commit")
        if (owner, bool(tables)) not in ((application_id, True), (0, False)):
            raise StoreError(f"{self.path} belongs to another program; use another folder")
        if version > known:
            raise StoreError(
                f"{self.path} was written by a newer version (schema {version}, known is {known}); use that version"
            )

    def _migrate(self, application_id: int, migrations: Sequence[str]) -> None:
        if self._patiently("pragma quick_check(1)").fetchone()[0] != "ok":
            raise StoreError(f"{self.path}: it is damaged; keep it as it is and restore a backup")
        with self.transaction():
            for position in range(self.version, len(migrations)):  # read again: another process may have been faster
                for statement in migrations[position].split(";"):
                    if statement.strip():
                        self._connection.execute(statement)
                self._connection.execute(f"pragma user_version = {position + 1}")
            self._connection.execute(f"pragma application_id = {application_id}")

    @property
    def version(self) -> int:
        """The number of migrations this file has seen."""
        return _pragma(self._patiently, "user_version")

    def execute(self, sql: str, parameters: Mapping[str, Any] | Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement."""
        try:
            return self._patiently(sql, parameters)
        except sqlite3.Error as error:
            raise self._explained(error) from error

    def _patiently(self, sql: str, parameters: Mapping[str, Any] | Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement; while another process holds the file, ask again."""
        give_up = 0.0
        while True:
            try:
                return self._connection.execute(sql, parameters)
            except sqlite3.OperationalError as error:
                give_up = give_up or time.monotonic() + BUSY_TIMEOUT_S
                if _primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                    raise
            time.sleep(BUSY_PAUSE_S)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One write transaction, or a part of the one around it: all of it is on disk when it ends, or nothing."""
        if self._connection.in_transaction:
            yield
            return
        try:
            self._patiently("begin immediate")
            yield
            self._patiently("commit")  # on disk from here on
        except BaseException as error:
            if self._connection.in_transaction:
                with suppress(sqlite3.Error):
                    self._connection.execute("rollback")
            if isinstance(error, sqlite3.Error):
                raise self._explained(error) from error
            raise

    async def write(self, work: Callable[[], T]) -> T:
        """Run `work` in a transaction which all share that ask at this moment; on disk when it returns.

        A `HarnessError` of one `work` is its own, so it must come before that work's first write; everything else
        that goes wrong undoes the transaction, and each runs again in one of its own.
        """
        from asyncio import get_running_loop

        loop = get_running_loop()
        if not self._waiting:
            loop.call_soon(self._write_when_quiet)
        future: Future[T] = loop.create_future()
        self._waiting.append((work, future))
        return await future

    def _write_when_quiet(self, quiet: int = 0, seen: int = 0) -> None:
        """Write as soon as nobody has joined for some turns of the event loop."""
        waiting = len(self._waiting)
        quiet = quiet + 1 if waiting == seen else 0
        if quiet < QUIET_TURNS:
            self._waiting[0][1].get_loop().call_soon(self._write_when_quiet, quiet, waiting)
            return
        ready, self._waiting = self._waiting, []
        self._settle(ready)

    def _settle(self, ready: Sequence[tuple[Callable[[], Any], Future[Any]]]) -> None:
        outcomes: Sequence[Any]
        try:
            with self.transaction():
                outcomes = [_outcome(work) for work, _ in ready]
        except BaseException as error:
            if len(ready) > 1 and isinstance(error, Exception):
                for alone in ready:
                    self._settle([alone])
                return
            outcomes = [error] * len(ready)
        for (_, future), outcome in zip(ready, outcomes, strict=True):
            if future.cancelled():
                continue  # written all the same
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._explained(error) from error

    def _explained(self, error: sqlite3.Error) -> StoreError:
        return StoreError(f"{self.path}: {_ADVICE.get(_primary_code(error), 'it failed')} ({error})")

    def compact(self) -> None:
        """Give the space of what was deleted back to the file system; takes about the file's size meanwhile."""
        self.execute("vacuum")
        self.execute("pragma wal_checkpoint(truncate)")

    def close(self) -> None:
        """Close the file; committed work stays."""
        self._connection.close()


def _read_only(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    if not any(path.with_name(path.name + log).exists() for log in ("-wal", "-journal")):
        uri += "&immutable=1"  # nobody is writing: SQLite need not leave lock files of its own behind
    return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)


def _pragma(execute: Callable[[str], sqlite3.Cursor], name: str) -> int:
    return int(execute(f"pragma {name}").fetchone()[0])


def _primary_code(error: Exception) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest is detail


def _outcome(work: Callable[[], T]) -> T | HarnessError:
    """What `work` returned, or why it was refused."""
    try:
        return work()
    except StoreError:
        raise
    except HarnessError as refusal:
        return refusal


def inspect(path: Path) -> tuple[int, str]:
    """The schema version of any SQLite file and "ok" or what its integrity check found; changes nothing."""
    try:
        with closing(_read_only(path)) as connection:
            found = [str(row[0]) for row in connection.execute("pragma integrity_check(3)")]
            return _pragma(connection.execute, "user_version"), "; ".join(found)
    except sqlite3.Error as error:
        return 0, str(error)
