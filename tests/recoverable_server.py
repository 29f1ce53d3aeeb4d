"""A tool server whose author keeps the contract with `miniharness.server`: notes in SQLite or in Postgres.

    recoverable_server.py DATABASE [FATE MET]

DATABASE is a file, or the URL of a Postgres. With a fate the first write that arrives ends badly, once, and leaves the
file MET: `before` and `after` kill the process before the transaction and after the commit, `inside` between the
author's own row and the commit; `refuse` says no. `unmarked` does not say that it keeps the contract, `mute` has no
outcome method, `empty` answers it with nothing.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from pydantic import BaseModel

from miniharness.server.extension import Recoverable
from miniharness.server.outcomes import Operation, Outcome, Refused

DATABASE, FATE, MET = sys.argv[1], *(sys.argv[2:] or ("", ""))
NOTES = "create table if not exists notes (id {} primary key, title text not null)"


def connect() -> Any:
    if DATABASE.startswith("postgresql://"):
        import psycopg

        return psycopg.connect(DATABASE)
    return sqlite3.connect(DATABASE, check_same_thread=False)


def die(*fates: str) -> None:
    if FATE in fates and not Path(MET).exists():
        Path(MET).touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Note(BaseModel):
    """A note."""

    id: int
    title: str


recoverable = Recoverable(connect)
done = recoverable.outcomes.once


def once(operation: Operation, effect: Any) -> Outcome:
    die("before")
    outcome = done(operation, effect)
    die("after")
    return outcome


recoverable.outcomes.once = once  # type: ignore[method-assign]


@recoverable.tool()
def add(db: Any, title: str) -> Note:
    """Add a note."""
    if FATE == "refuse":
        raise Refused("the notebook is full")
    mark = "?" if isinstance(db, sqlite3.Connection) else "%s"
    row = db.execute(f"insert into notes (title) values ({mark}) returning id", (title,)).fetchone()
    die("inside")
    return Note(id=row[0], title=title)


if FATE == "unmarked":
    recoverable._tools["add"].binding.meta.clear()
if FATE == "mute":
    recoverable.methods = tuple  # type: ignore[method-assign, assignment]
if FATE == "empty":

    async def nothing(request: Any, params: Any) -> dict[str, Any]:
        return {}

    recoverable._answer = nothing  # type: ignore[method-assign, assignment]

server = MCPServer("notes", log_level="WARNING", extensions=[recoverable])

if __name__ == "__main__":
    own = connect()
    own.execute(NOTES.format("integer" if isinstance(own, sqlite3.Connection) else "serial"))
    own.commit()
    own.close()
    server.run()
