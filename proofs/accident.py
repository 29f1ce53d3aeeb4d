"""An accident at a chosen SQL statement of one process: it is killed, frozen, its disk is full, its file is held."""

from __future__ import annotations

import json
import os
import select
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONNECT = sqlite3.connect
BALLAST = "ballast"
GRASP_S = 0.15  # so long the victim waits until its file is held; a victim inside a transaction holds it itself


@dataclass(frozen=True, slots=True)
class Accident:
    """What happens to `side` before or after a statement: a number, or a text and `#n` for the n-th that holds it."""

    side: str  # engine | server
    action: str  # kill | freeze | full | busy | pause
    moment: str  # before | after
    statement: str

    def __str__(self) -> str:
        return f"{self.action} {self.side} {self.moment} {self.statement}"


class Notes:
    """What the processes of one trial tell the proof; it stands in memory, outside of every disk that can be full."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("notes")

    def add(self, **note: Any) -> None:
        """Append one note; whole, whoever else is writing."""
        os.write(self.fd, json.dumps(note).encode() + b"\n")

    def read(self, what: str) -> list[dict[str, Any]]:
        """Every note that has the field `what`, oldest first."""
        return list(self._read(what))

    def _read(self, what: str) -> Iterator[dict[str, Any]]:
        for line in os.pread(self.fd, 1 << 24, 0).decode().splitlines():
            note = json.loads(line)
            if what in note:
                yield note

    def close(self) -> None:
        """Forget them."""
        os.close(self.fd)


class Watch:
    """Counts the statements of a process and has the accident happen at the one that it names."""

    def __init__(self, side: str, accident: Accident | None, notes: Notes, folder: Path, holder: Holder | None) -> None:
        self._side = side
        self._accident = accident if accident and accident.side == side else None
        self._notes = notes
        self._folder = folder
        self._holder = holder
        self._count = 0
        self._seen = 0
        self.transcript: list[str] = []

    def connect(self, path: Any, **options: Any) -> sqlite3.Connection:
        """`sqlite3.connect`, watched."""
        watch = self

        class Watched(sqlite3.Connection):
            def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
                due = watch.before(sql)
                cursor = super().execute(sql, parameters)
                watch.after(sql, due)
                return cursor

        return CONNECT(path, factory=Watched, **options)

    def before(self, sql: str) -> bool:
        """Call it before a statement; the answer belongs to `after`."""
        self._count += 1
        self.transcript.append(" ".join(sql.split())[:80])
        due = self._accident is not None and self._is_due(self._accident.statement, sql)
        if due and self._accident and self._accident.moment == "before":
            self._happen(sql)
        return due

    def after(self, sql: str, due: bool) -> None:
        """Call it after a statement that did not fail."""
        if due and self._accident and self._accident.moment == "after":
            self._happen(sql)

    def _is_due(self, statement: str, sql: str) -> bool:
        text, _, nth = statement.partition("#")
        if text.isdecimal():
            return self._count == int(text)
        self._seen += text in sql
        return text in sql and self._seen == int(nth or 1)

    def _happen(self, sql: str) -> None:
        assert self._accident
        action = self._accident.action
        self._notes.add(accident=action, side=self._side, pid=os.getpid(), sql=self.transcript[-1])
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "full":
            fill(self._folder)
        elif self._holder:
            self._holder.hold()


def fill(folder: Path) -> None:
    """Leave not a byte of room on the disk of `folder`."""
    ballast = os.open(folder / BALLAST, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for size in (1 << 16, 1 << 12):
        with suppress(OSError):
            while True:
                os.write(ballast, bytes(size))
    os.close(ballast)


class Holder:
    """Another program that will hold a database file locked: for `seconds`, or until it is killed.

    It is a process of its own and is forked before anybody has the file open.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        ask, self._tell = os.pipe()
        self._held, held = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._tell)
            if os.read(ask, 1):
                connection = CONNECT(path, timeout=20, isolation_level=None)
                connection.execute("begin immediate")
                os.write(held, b"!")
                select.select([], [], [], seconds)
            os._exit(0)
        os.close(ask)
        os.close(held)

    @property
    def pipes(self) -> tuple[int, int]:
        """The descriptors that the victim needs."""
        return self._tell, self._held

    def hold(self) -> None:
        """Have it take the lock now, or as soon as this process lets go of it."""
        os.write(self._tell, b"!")
        select.select([self._held], [], [], GRASP_S)

    def close(self) -> None:
        """End it; the lock goes with it."""
        os.close(self._tell)
        os.close(self._held)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
