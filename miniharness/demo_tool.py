"""The tool process of the demo: `plain` inserts one row and ends, `mcp` serves two tools.

With the fate `die` it kills itself after its first commit.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from typing import Any


def serve(world: str, path: str, fate: str) -> None:
    """Be the tool process of one world."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=5)
    connection.execute("create table if not exists notes (id integer primary key, op text unique, text text not null)")
    if world == "plain":
        _write(connection, None, "refund order 1001", fate)
    else:
        _serve_mcp(connection, fate)


def _write(connection: sqlite3.Connection, op: str | None, text: str, fate: str) -> None:
    connection.execute("insert or ignore into notes (op, text) values (?, ?)", (op, text))  # committed
    if fate == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def _serve_mcp(connection: sqlite3.Connection, fate: str) -> None:
    from mcp.server import MCPServer

    server = MCPServer("notes", log_level="WARNING")

    @server.tool()
    async def lookup_note(operation_key: str) -> dict[str, Any]:
        """Find the note of an operation key."""
        row = connection.execute("select id, text from notes where op = ?", (operation_key,)).fetchone()
        return {"note": {"id": row[0], "action": {"text": row[1]}} if row else None}

    @server.tool()
    async def create_note(operation_key: str, text: str) -> dict[str, Any]:
        """Create the note of an operation key, once."""
        _write(connection, operation_key, text, fate)
        return await lookup_note(operation_key)

    server.run()


if __name__ == "__main__":
    serve(*sys.argv[1:])
