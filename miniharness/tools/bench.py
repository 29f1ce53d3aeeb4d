"""A tool on the bench: its server is started, killed and frozen at will, its effects are looked up and counted.

Knows no experiment: what is tried is in `probe.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miniharness.engine import Json
from miniharness.errors import ToolUnavailable, UsageError
from miniharness.mcp.child import Child
from miniharness.mcp.session import CallFailed
from miniharness.mcp.wire import EPOCH_META, KEY_META
from miniharness.tools import config, references
from miniharness.tools.remote import ServerTool, answer, query, session_for, whole
from miniharness.tools.target import Target

if TYPE_CHECKING:
    from mcp.types import CallToolResult

LONGEST_S = 10.0  # that one call may take here, whatever is declared


@dataclass(frozen=True, slots=True)
class Operation:
    """One write: its key, and the arguments without it."""

    key: str
    arguments: Json


@dataclass(frozen=True, slots=True)
class Seen:
    """What is there of an operation: the resource that the look-up finds, and how many effects are counted.

    `count` is None where nothing counts them. Two of them are equal when nothing has changed in between.
    """

    found: Json | None
    count: int | None

    @property
    def there(self) -> bool:
        """Whether the effect is there; a count is believed before a look-up."""
        return self.found is not None if self.count is None else self.count > 0

    @property
    def id(self) -> Any:
        """What names the resource; None where it is not there or has no name."""
        return self.found["id"] if self.found else None

    def __str__(self) -> str:
        named = f" ({self.id})" if self.id is not None else ""
        counted = f", counted {self.count}" if self.count is not None else ""
        return ("there" + named if self.found is not None or self.there else "not there") + counted


@dataclass(frozen=True, slots=True)
class Written:
    """What came back of a write. `id` names the resource, where the answer has the form of the look-up's answer."""

    id: Any = None
    refused: bool = False
    fault: str = ""

    def __str__(self) -> str:
        if not self.fault:
            return "answered" + (f" ({self.id})" if self.id is not None else "")
        return f"refused with {self.fault!a}" if self.refused else f"not answered ({self.fault})"


class _Watched(Child):
    """A server process that tells when a request has left for it."""

    def __init__(self, server: config.Server) -> None:
        super().__init__(server.command, server.env, subprocess.DEVNULL)  # who is killed so often has much to say
        self.left = asyncio.Event()

    async def write(self, data: bytes, limit_s: float) -> None:
        await super().write(data, limit_s)
        self.left.set()

    def freeze(self) -> None:
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)


class Running:
    """A server of the bench that lives; `child` is its process, where that is ours."""

    def __init__(self, bench: Bench, tool: ServerTool, child: _Watched | None) -> None:
        self._bench = bench
        self._tool = tool
        self._child = child

    @property
    def child(self) -> _Watched:
        """Its process, which is ours."""
        assert self._child
        return self._child

    async def see(self, operation: Operation, epoch: int) -> Seen:
        """Look the operation up, and count its effects.

        Raises:
            ToolUnavailable: it gave no usable answer.
        """
        bench, found = self._bench, None
        if bench.looks_up:
            port = self._tool.port(operation.arguments, bench.compared(operation))
            found = await port.look_up(operation.key, epoch)
        return Seen(found, await self._count(bench.count, operation) if bench.count else None)

    async def _count(self, asked: config.LookUp, operation: Operation) -> int:
        arguments = references.filled(asked.arguments, references.known(operation.key, operation.arguments))

        def read(result: CallToolResult) -> int:
            number = answer(asked, operation.key, operation.arguments, result)
            if isinstance(number, bool) or not isinstance(number, int | float) or number % 1:
                raise ValueError(f"{asked.found} gives {number!r}, which is no whole number")
            return int(number)

        try:
            return await self._tool.session.call(asked.tool, arguments, read, {})
        except CallFailed as error:
            raise ToolUnavailable(f"the effects could not be counted ({error.reason})") from error

    async def write(self, operation: Operation, epoch: int) -> Written:
        """Send the write once, and tell what came back."""
        bench, check = self._bench, whole(self._tool.session, self._tool.name)
        sent = self._tool.sent(operation.key, operation.arguments)

        def read(result: CallToolResult) -> Any:
            check(result)
            return bench.named(operation, result)

        began = time.monotonic()
        try:
            meta = {EPOCH_META: epoch, KEY_META: operation.key}
            named = await self._tool.session.call(self._tool.name, sent, read, meta)
        except CallFailed as error:
            return Written(refused=bool(error.error), fault=error.reason)
        bench.write_s = time.monotonic() - began
        return Written(named)

    async def strike(
        self, operation: Operation, epoch: int, after_s: float, blow: Callable[[], None]
    ) -> asyncio.Task[Written]:
        """Send a write and deal the server a `blow` that long after the request has left; the write goes on."""
        self.child.left.clear()
        writing = asyncio.create_task(self.write(operation, epoch))
        leaving = asyncio.create_task(self.child.left.wait())
        await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        await asyncio.sleep(after_s)
        blow()
        return writing


class Bench:
    """A tool on trial: its server, which is started when it is needed, and fresh operations.

    `target` is the tool, with the key and the look-up that it is probed with, `count` the query for the number of
    effects of an operation. Operations differ in the argument `varied`, where there is one.

    Raises:
        UsageError: the arguments, what may vary of them, or the queries cannot be used.
    """

    def __init__(
        self, server: config.Server, target: Target, arguments: Json, *, varied: str | None, count: config.LookUp | None
    ) -> None:
        self.server = server
        self.target = target
        self.count = count or _counting(target.declared.look_up)
        self.varied = _varied(arguments, varied, target.declared)
        self.write_s = 0.0  # how long the last write that was answered took
        self._arguments = arguments
        self._token, self._numbers = secrets.token_hex(3), itertools.count(1)
        self._stack = AsyncExitStack()
        self._running: Running | None = None
        if target.declared.key in arguments:
            raise UsageError(f"the argument {target.declared.key} carries the operation key; leave it out of --args")
        if unknown := references.named([count.model_dump()] if count else []) - arguments.keys():
            raise UsageError(f"--count: $args.{min(unknown)} is no argument in --args")
        if not (self.looks_up or self.count):
            raise UsageError(
                f"nothing shows what {target.full_name} does: declare look_up in harness.toml, "
                'or give --lookup or --count \'{ tool = "...", found = "..." }\''
            )

    async def __aenter__(self) -> Bench:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    @property
    def looks_up(self) -> bool:
        """Whether there is a look-up."""
        return bool(self.target.declared.asked)

    @property
    def own(self) -> bool:
        """Whether the server is a process of ours, which can be killed, frozen and restarted."""
        return not self.server.url

    def compared(self, operation: Operation) -> frozenset[str]:
        """The fields of the operation's goal."""
        return frozenset(self.goal(operation))

    def goal(self, operation: Operation) -> Json:
        """What a run of this operation would want to be there."""
        return self.target.contract(operation.arguments, None, budget=None, deadline=None, command="").goal

    def named(self, operation: Operation, result: CallToolResult) -> Any:
        """What an answer to the write says that names the resource; None when it says nothing."""
        if look_up := self.target.declared.look_up:
            with suppress(ValueError):
                read = query(look_up, operation.arguments, self.compared(operation)).read
                return (read(operation.key, result) or {}).get("id")
        return (result.structured_content or {}).get("id") if self.target.declared.outcome else None

    def fresh(self, key: str | None = None) -> Operation:
        """An operation that there was not before, or other content under the `key` of one."""
        number = next(self._numbers)
        mark, arguments = f"{self._token}-{number}", dict(self._arguments)
        if self.varied:
            value = arguments[self.varied]
            arguments[self.varied] = f"{value} {mark}" if isinstance(value, str) else value + number
        return Operation(key or f"probe-{mark}:{self.target.declared.resource}", arguments)

    async def running(self) -> Running:
        """The server that lives; one is started when there is none."""
        if self._running is None:
            self._running = await self._stack.enter_async_context(self.started())
        return self._running

    async def stop(self) -> None:
        """End the server, as a client that leaves does; one that is dead is only forgotten."""
        self._running = None
        await self._stack.aclose()

    @asynccontextmanager
    async def started(self) -> AsyncIterator[Running]:
        """One more server over the same data."""
        limit_s = min(self.target.declared.timeout, LONGEST_S)
        child = _Watched(self.server) if self.own else None
        async with session_for(self.server, limit_s, child) as session:
            await session.connect({})
            tool = ServerTool(self.target.server, self.target.name, self.target.declared, session)
            tool.pinned  # noqa: B018  # both tools must be there
            tool.check(self._arguments)
            if self.count:
                session.tool(self.count.tool)
            yield Running(self, tool, child)


async def offered(server: config.Server) -> dict[str, Json]:
    """The tools that a server offers, by name, each with its annotations: hints, which prove nothing.

    Raises:
        ToolUnavailable: it cannot be asked.
    """
    async with session_for(server, LONGEST_S) as session:
        await session.connect({})
        hints = {name: tool.annotations for name, tool in sorted(session.tools.items())}
        return {n: h.model_dump(by_alias=True, exclude_none=True) if h else {} for n, h in hints.items()}


def _counting(look_up: config.LookUp | None) -> config.LookUp | None:
    """The query that counts what a look-up finds: one that takes the first of a list can count the list."""
    first = re.fullmatch(r"(.+)\|\s*\[0\]\s*", look_up.found, re.DOTALL) if look_up else None
    return look_up.model_copy(update={"found": f"length(({first[1]}) || `[]`)"}) if look_up and first else None


def _varied(arguments: Json, wanted: str | None, declared: config.Tool) -> str | None:
    """The argument that makes operations differ."""
    texts = [name for name, value in arguments.items() if isinstance(value, str) and value]
    name = wanted or (texts[0] if texts else None)
    if name is None and not declared.key:
        raise UsageError("--args has no text that may vary from one experiment to the next; name one with --vary NAME")
    if name is not None and (name not in arguments or type(arguments[name]) not in (str, int)):
        raise UsageError(f"--vary {name} must name an argument in --args that is a text or a whole number")
    return name
