"""Messages over pipes, for both ends.

Hardened where the SDK's own transport hangs, crashes or cannot say what was sent, and where it hands each line through
a thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from miniharness.mcp import catalogue
from miniharness.mcp.child import Child
from miniharness.mcp.wire import Limits, mark_sent

if TYPE_CHECKING:
    from mcp.server import MCPServer

REQUEST_BYTES = 8 << 20  # that a server takes

Incoming = MemoryObjectSendStream[SessionMessage | Exception]


class Outgoing:
    """A write stream. It writes in the caller's task, so an error belongs to one call and no other."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._write = write

    async def send(self, item: SessionMessage, /) -> None:
        """Write one message.

        Raises:
            ValueError: it cannot be put into UTF-8 (a lone surrogate); nothing was written.
            BrokenResourceError: the other side is gone.
        """
        await self._write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")

    async def aclose(self) -> None:
        """Nothing to do: the pipe is closed by who opened it."""

    async def __aenter__(self) -> Outgoing:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


# -- the client's end: a child's pipes ---------------------------------------------------------------------------------


@asynccontextmanager
async def streams(
    child: Child, limits: Limits
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[SessionMessage | Exception], Outgoing]]:
    """The read and write stream for the SDK's `Client`, over an already running child, which is closed at the end."""

    async def write(line: bytes) -> None:
        if child.died.is_set():
            raise anyio.BrokenResourceError
        mark_sent()
        try:
            await child.write(line, limits.write_s)
        except OSError as error:
            raise anyio.BrokenResourceError from error

    incoming, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    await child.open()
    reading = asyncio.create_task(_read(child, incoming, limits))
    try:
        yield received, Outgoing(write)
    finally:
        received.close()
        try:
            await child.close(limits)
        finally:
            reading.cancel()
            await asyncio.wait({reading})


async def _read(child: Child, incoming: Incoming, limits: Limits) -> None:
    """Hand on what the child says; it ends when the child does."""
    async with incoming:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # nobody listens any more
            try:
                async for line in _lines(child.output, limits.reply_bytes):
                    await _deliver(line, incoming)
            except LineTooLong:
                child.kill(f"one of its answers is longer than the limit of {limits.reply_bytes} bytes")


class LineTooLong(Exception):
    """Somebody sends a line without an end."""


async def _lines(source: asyncio.StreamReader, limit: int) -> AsyncIterator[bytes]:
    """Cut what comes into lines, in linear time and bounded memory.

    Raises:
        LineTooLong: one has more than `limit` bytes.
    """
    pieces: list[bytes] = []
    size = 0
    while chunk := await source.read(1 << 16):
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join((*pieces, end))
            pieces, size = [], 0
        pieces.append(rest)
        size += len(rest)
        if size > limit:
            raise LineTooLong


async def _deliver(line: bytes, incoming: Incoming) -> None:
    """Hand a message on; what is not one (a banner, a log line) is passed over."""
    text = line.decode("utf-8", "replace")
    try:
        message = jsonrpc_message_adapter.validate_json(text, by_name=False)
    except ValueError:
        try:  # the strict parser refuses an escaped lone surrogate; the answer around it still counts
            message = jsonrpc_message_adapter.validate_python(_mended(json.loads(text)), by_name=False)
        except (ValueError, RecursionError):
            return
    await incoming.send(catalogue.mended(SessionMessage(message)))


def _mended(value: Any) -> Any:
    """The same JSON value with each lone surrogate replaced by U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    return value


# -- the server's end: standard input and output -----------------------------------------------------------------------


async def serve(server: MCPServer) -> None:
    """Serve the client at the other end of standard input and output until it closes them.

    Requests that have arrived together are begun together, so that they can share a commit. What else is printed goes
    to standard error.
    """
    if not all(stat.S_ISFIFO(os.fstat(fd).st_mode) or stat.S_ISSOCK(os.fstat(fd).st_mode) for fd in (0, 1)):
        await server.run_stdio_async()  # a file or a terminal, which the event loop cannot watch
        return
    loop = asyncio.get_running_loop()
    source = asyncio.StreamReader()
    taken, given = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(source), taken)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, given)
    output = asyncio.StreamWriter(transport, protocol, None, loop)

    async def write(line: bytes) -> None:
        output.write(line)
        try:
            await output.drain()
        except ConnectionError as error:
            raise anyio.BrokenResourceError from error

    incoming, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    reading = asyncio.create_task(_take(source, incoming))
    low = server._lowlevel_server  # the SDK has no public way to run over other streams
    try:
        await low.run(received, Outgoing(write), low.create_initialization_options())
    finally:
        reading.cancel()


async def _take(source: asyncio.StreamReader, incoming: Incoming) -> None:
    """Hand requests on until the client has no more; one that cannot be read is reported and passed over."""
    async with incoming:
        async for line in _lines(source, REQUEST_BYTES):
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError as error:
                await incoming.send(error)
            else:
                await incoming.send(SessionMessage(message))
