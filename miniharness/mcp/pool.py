"""A few servers for many runs: each is watched, and replaced after a pause when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from miniharness.errors import ToolUnavailable
from miniharness.mcp.declared import Declaration, DeclaredTool
from miniharness.mcp.session import Session

DEATHS = 5
PAUSE_S = 0.1  # before the second start; doubled for each death in a row
LONGEST_PAUSE_S = 5.0


class PoolExhausted(ToolUnavailable):
    """The server ends again and again; mend it, then run the same command again."""


class Pool:
    """Up to `size` connected tools, handed out in turn; the first is asked for when it is needed.

    Its sessions live in tasks of its own, as the SDK needs it. A server that ends five times in a row before any run
    got through with it ends the pool.
    """

    def __init__(self, start: Callable[[], Session], declared: Declaration, size: int) -> None:
        self._start = start
        self._declared = declared
        self._size = size
        self._ready: asyncio.Queue[DeclaredTool] = asyncio.Queue()
        self._useful: set[DeclaredTool] = set()
        self._exhausted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keepers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(self, *error: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if not self._exhausted.cancel():
            self._exhausted.exception()  # it was told to those who asked

    async def _keep(self) -> None:
        """Have one living server after another until this is cancelled."""
        deaths = 0
        while deaths < DEATHS:
            useful = False
            try:
                async with self._start() as session:
                    tool = DeclaredTool(session, self._declared)
                    await tool.connect()
                    self._ready.put_nowait(tool)
                    ending = await session.died()
                    useful = tool in self._useful
                    self._useful.discard(tool)
            except ToolUnavailable as error:
                ending = str(error)
            deaths = 1 if useful else deaths + 1
            await asyncio.sleep(min(PAUSE_S * 2 ** (deaths - 1), LONGEST_PAUSE_S))
        if not self._exhausted.done():
            self._exhausted.set_exception(PoolExhausted(f"the server ended {deaths} times in a row: {ending}"))

    async def tool(self) -> DeclaredTool:
        """A connected tool whose server lives; waits while there is none.

        Raises:
            PoolExhausted: there will be none.
        """
        self._keepers = self._keepers or [asyncio.create_task(self._keep()) for _ in range(self._size)]
        while True:
            tool = await self._next() if self._ready.empty() else self._ready.get_nowait()
            if not tool.session.dead:
                self._ready.put_nowait(tool)  # to the end of the queue; it takes many calls at once
                return tool

    async def _next(self) -> DeclaredTool:
        getting = asyncio.ensure_future(self._ready.get())
        try:
            either: set[asyncio.Future[Any]] = {getting, self._exhausted}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                self._exhausted.result()
            return getting.result()
        finally:
            getting.cancel()

    def praise(self, tool: DeclaredTool) -> None:
        """A run got through with `tool`: its server works."""
        self._useful.add(tool)
