"""The obvious way: the SDK's own client starts the ticket server, looks up, creates, and looks up again.

Nothing is durable on this side, and a crash in the middle is not survived. With a number it does so for as many
tickets, 32 in flight, and prints how many it made per second.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

IN_FLIGHT = 32
SERVER = Path(__file__).resolve().parents[1] / "server.py"


async def create(database: str, count: int) -> None:
    """Make the three calls for each of `count` tickets."""
    server = StdioServerParameters(command=sys.executable, args=[str(SERVER), "--db", database])
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        started, numbers = time.perf_counter(), iter(range(count))
        await asyncio.gather(*(_some(session, numbers) for _ in range(IN_FLIGHT)))
        if count > 1:
            print(count / (time.perf_counter() - started))


async def _some(session: ClientSession, numbers: Iterator[int]) -> None:
    for number in numbers:
        key = {"operation_key": f"plain-{number}:ticket"}
        await session.call_tool("lookup_review_ticket", key)
        await session.call_tool("create_review_ticket", {**key, "source": "source-001", "title": "Check"})
        found = await session.call_tool("lookup_review_ticket", key)
        assert (found.structured_content or {})["ticket"]["action"]["title"] == "Check", found


if __name__ == "__main__":
    asyncio.run(create(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1))
