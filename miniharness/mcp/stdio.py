"""Messages over a child's pipes, hardened where the SDK's own transport hangs, crashes or cannot say what was sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from miniharness.mcp.child import Child
from miniharness.mcp.wire import Limits, mark_sent

Incoming = MemoryObjectSendStream[SessionMessage | Exception]


class Outgoing:
    """The client's write stream. It writes in the caller's task, so an error belongs to one call and no other."""

    def __init__(self, child: Child, limits: Limits) -> None:
        self._child = child
        self._limits = limits

    async def send(self, item: SessionMessage, /) -> None:
        """Write one message.

        Raises:
            ValueError: it cannot be put into UTF-8 (a lone surrogate); nothing was written.
            BrokenResourceError: the child is gone.
        """
        line = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
        if self._child.died.is_set():
            raise anyio.BrokenResourceError
        mark_sent()
        try:
            await self._child.write(line, self._limits.write_s)
        except OSError as error:
            raise anyio.BrokenResourceError from error

    async def aclose(self) -> None:
        """Nothing to do: the child's input is closed with the child."""

    async def __aenter__(self) -> Outgoing:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


@asynccontextmanager
async def streams(
    child: Child, limits: Limits
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[SessionMessage | Exception], Outgoing]]:
    """The read and write stream for the SDK's `Client`, over an already running child, which is closed at the end."""
    incoming, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    await child.open()
    reading = asyncio.create_task(_read(child, incoming, limits))
    try:
        yield received, Outgoing(child, limits)
    finally:
        received.close()
        try:
            await child.close(limits)
        finally:
            reading.cancel()
            await asyncio.wait({reading})


async def _read(child: Child, incoming: Incoming, limits: Limits) -> None:
    """Cut the output into lines, in linear time and bounded memory; it ends when the child does."""
    pieces: list[bytes] = []
    size = 0
    async with incoming:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # nobody listens any more
            while chunk := await child.output.read(1 << 16):
                *ends, rest = chunk.split(b"\n")
                for end in ends:
                    await _deliver(b"".join((*pieces, end)), incoming)
                    pieces, size = [], 0
                pieces.append(rest)
                size += len(rest)
                if size > limits.reply_bytes:
                    child.kill(f"one of its answers is longer than the limit of {limits.reply_bytes} bytes")
                    return


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
    await incoming.send(SessionMessage(message))


def _mended(value: Any) -> Any:
    """The same JSON value with each lone surrogate replaced by U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    return value
