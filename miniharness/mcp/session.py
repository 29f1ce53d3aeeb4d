"""One connection to one server, and the one door through which every tool result comes in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from miniharness.contract import canonical
from miniharness.errors import OutcomeUnknown, ToolUnavailable
from miniharness.mcp.child import Child
from miniharness.mcp.wire import CURRENT, Limits, Request

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

DEATH_S = 0.2
SDK_TIMEOUT = -32001
ACCEPTED = ("2025-11-25", "2026-07-28")

T = TypeVar("T")
A = TypeVar("A", bound=BaseModel)


class CallFailed(OutcomeUnknown):
    """The call gave no usable answer. `sent` tells whether it may have arrived, `late` whether it took too long,
    `error` is what the tool itself says of it: its structured error, or its text as the `message`."""

    def __init__(self, message: str, *, sent: bool, late: bool = False, error: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.sent = sent
        self.late = late
        self.error = error or {}

    @property
    def reason(self) -> str:
        """The tool's own words where it gave some, otherwise ours."""
        return str(self.error.get("message") or self)[:500]


class Session:
    """A connection that is opened on `connect` and closed with the `async with` block.

    The SDK is imported only in `connect`: a child that is already starting warms up at the same time.
    """

    def __init__(self, transport: Callable[[], Any], child: Child | None, limits: Limits, mode: str) -> None:
        self._transport = transport
        self._child = child
        self._limits = limits
        self._mode = mode
        self._stack = AsyncExitStack()
        self._client: Client | None = None
        self._info: dict[str, Any] | None = None
        self.tools: dict[str, Tool] = {}  # what the server offers

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            with suppress(Exception):  # what a broken connection says while it closes changes nothing any more
                await self._stack.aclose()
        finally:
            if self._child:
                self._child.discard()

    @property
    def dead(self) -> bool:
        """Whether the server, our own child, has ended."""
        return self._child is not None and self._child.died.is_set()

    async def dies(self) -> bool:
        """Whether the server, our own child, has ended or is just ending: a closed pipe is noticed a moment earlier."""
        if self._child:
            with suppress(TimeoutError):
                async with asyncio.timeout(DEATH_S):
                    await self._child.died.wait()
        return self.dead

    def end(self, why: str) -> None:
        """Kill the server, if it is our own child."""
        if self._child:
            self._child.kill(why)

    async def died(self) -> str:
        """Wait for the end of the server, our own child, and return how it ended."""
        await (self._child.died if self._child else asyncio.Event()).wait()
        return self._child.ending if self._child else ""

    async def connect(self, needs: Mapping[str, frozenset[str]]) -> dict[str, Any]:
        """Shake hands, once, and check that each needed tool is there with its arguments; returns version and server.

        Args:
            needs: for each tool the arguments that it must require.

        Raises:
            ToolUnavailable: within `handshake_s`, with the reason.
        """
        if self._info is not None:
            return self._info
        limit_s, request = self._limits.handshake_s, Request()
        token = CURRENT.set(request)
        try:
            async with asyncio.timeout(limit_s):
                self._info = await self._shake_hands(needs)
                return self._info
        except TimeoutError:
            raise ToolUnavailable(f"the server did not finish its handshake within {limit_s:g} s") from None
        except ToolUnavailable:
            raise
        except Exception as error:
            raise ToolUnavailable(
                f"the handshake with the server failed: {request.fault or self._tell(error)}"
            ) from error
        finally:
            CURRENT.reset(token)

    async def _shake_hands(self, needs: Mapping[str, frozenset[str]]) -> dict[str, Any]:
        from mcp import Client

        client = Client(self._transport(), mode=self._mode, cache=None)
        self._client = await self._stack.enter_async_context(client)
        version, server = self._client.protocol_version, self._client.server_info
        if version not in ACCEPTED:
            raise ToolUnavailable(f"the server speaks protocol {version}; accepted are {', '.join(ACCEPTED)}")
        await self._list_tools()
        for name, arguments in needs.items():
            if missing := arguments - set(self.tool(name).input_schema.get("required", ())):
                raise ToolUnavailable(f"the server's tool {name} does not require {', '.join(sorted(missing))}")
        return {"protocol": version, "server": server.name if server else None}

    async def _list_tools(self) -> None:
        """Take the catalogue, page by page."""
        assert self._client is not None
        cursor = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            self.tools |= {tool.name: tool for tool in page.tools}
            if not (cursor := page.next_cursor):
                return

    def tool(self, name: str) -> Tool:
        """The entry of that tool in the catalogue.

        Raises:
            ToolUnavailable: there is none, or it is broken.
        """
        from miniharness.mcp.catalogue import BROKEN_META

        found = self.tools.get(name)
        if found is None:
            raise ToolUnavailable(f"the server offers no tool {name}")
        if reason := (found.meta or {}).get(BROKEN_META):
            raise ToolUnavailable(f"the server's tool {name} is set aside: {reason}")
        return found

    async def call(
        self, name: str, arguments: Mapping[str, Any], read: Callable[[CallToolResult], T], meta: Mapping[str, Any]
    ) -> T:
        """Call a tool once and return what `read` makes of its result, or why it cannot (`ValueError`).

        Raises:
            CallFailed: anything else that can happen, a tool error included.
        """
        from mcp import types

        try:
            canonical([arguments, meta]).encode()
        except ValueError as error:  # over HTTP it would end the whole session
            raise CallFailed(f"{name}: the request holds text that is not Unicode", sent=False) from error
        params = types.CallToolRequestParams.model_validate(
            {"name": name, "arguments": dict(arguments), "_meta": dict(meta)}
        )
        result = await self.ask(name, types.CallToolRequest(params=params), types.CallToolResult)
        content = result.structured_content
        if result.is_error:
            told = content.get("error") if isinstance(content, dict) else None
            reported = told if isinstance(told, dict) else {"message": text_of(result)}
            raise CallFailed(f"{name}: the tool reported an error", sent=True, error=reported)
        try:
            return read(result)
        except ValueError as error:
            faults = f"{error.error_count()} faults" if isinstance(error, ValidationError) else str(error)
            raise CallFailed(f"{name}: the answer breaks its schema ({faults})", sent=True) from error

    async def ask(self, name: str, question: Any, answer: type[A]) -> A:
        """Send the request `question` once, and return its `answer`; `name` is how messages call it.

        Raises:
            CallFailed: there was no such answer; what the SDK says is its cause.
        """
        assert self._client is not None, "connect() comes first"
        request, limit_s = Request(), self._limits.read_s
        token = CURRENT.set(request)
        try:
            async with asyncio.timeout(limit_s + self._limits.write_s):
                return await self._client.session.send_request(question, answer, request_read_timeout_seconds=limit_s)
        except Exception as error:  # whatever it was: the effect may be there
            if self._child and self._child.output.at_eof():
                await self.dies()  # it is the better reason
            reason, late = request.fault or self._tell(error), _is_late(error)
            raise CallFailed(f"{name}: {reason}", sent=request.sent, late=late) from error
        finally:
            CURRENT.reset(token)

    def _tell(self, error: BaseException) -> str:
        """The innermost reason, in words that name no content."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, RuntimeError):  # the SDK refuses the protocol version, and then closes the connection
            return str(error)
        if self._child and (self._child.died.is_set() or self._child.fault):
            return f"the server is gone: {self._child.ending}"
        if isinstance(error, ValidationError):
            return f"the answer breaks the protocol ({error.error_count()} faults)"
        if _is_late(error):
            return f"no answer within {self._limits.read_s:g} s"
        return str(error).partition("\n")[0] or type(error).__name__  # what follows may quote content


def text_of(result: CallToolResult) -> str:
    """The text of an answer, without what is no text."""
    return "".join(getattr(block, "text", "") for block in result.content)


def _is_late(error: BaseException) -> bool:
    return isinstance(error, TimeoutError) or getattr(error, "code", None) == SDK_TIMEOUT


def stdio_session(child: Child, limits: Limits, mode: str = "auto") -> Session:
    """A session with a server child that is already starting; it ends with the session."""

    def transport() -> AbstractAsyncContextManager[Any]:
        from miniharness.mcp.stdio import streams

        return streams(child, limits)

    return Session(transport, child, limits, mode)


def http_session(url: str, headers: Mapping[str, str], limits: Limits, mode: str = "auto") -> Session:
    """A session with a running HTTP server."""

    def transport() -> AbstractAsyncContextManager[Any]:
        from miniharness.mcp.http import streams

        return streams(url, headers, limits)

    return Session(transport, None, limits, mode)
