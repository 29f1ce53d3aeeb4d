"""The obvious way: the SDK's own client starts the ticket server, looks up, creates, and looks up again.

Nothing is durable here, and a crash in the middle is not survived.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

SERVER = Path(__file__).resolve().parents[1] / "server.py"


async def create(database: str) -> None:
    """Make the three calls."""
    key = {"operation_key": "plain:ticket"}
    server = StdioServerParameters(command=sys.executable, args=[str(SERVER), "--db", database])
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        await session.call_tool("lookup_review_ticket", key)
        await session.call_tool("create_review_ticket", {**key, "source": "source-001", "title": "Check"})
        found = await session.call_tool("lookup_review_ticket", key)
        assert (found.structured_content or {})["ticket"]["id"] == 1, found


if __name__ == "__main__":
    asyncio.run(create(sys.argv[1]))
