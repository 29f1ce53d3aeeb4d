"""Streamable HTTP through the SDK's client, over a connection that fails one call at a time and bounds each answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

from miniharness.mcp.catalogue import mended
from miniharness.mcp.wire import TOKEN, Limits, mark_fault, mark_sent

_REFUSED = {
    401: f"it refuses the bearer token; check {TOKEN} on both sides",
    403: f"it refuses the bearer token; check {TOKEN} on both sides",
    404: "there is no MCP server at this path; start another run with the right --url",
    421: "it refuses this host name; call it by the name it was started with",
}


class _Contained(httpx2.AsyncBaseTransport):
    """The SDK lets a connection error take down every call of the session; here it is an answer to its own call."""

    def __init__(self, limits: Limits) -> None:
        self._inner = httpx2.AsyncHTTPTransport(retries=0)
        self._limits = limits

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await self._inner.handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            mark_fault(f"nothing answers at {request.url}; start it; another address needs another run")
            return _unreachable(request, error)  # provably not sent
        except httpx2.TransportError as error:
            mark_sent()
            return _unreachable(request, error)
        mark_sent()
        if response.status_code in _REFUSED:
            mark_fault(f"{request.url} answered HTTP {response.status_code}: {_REFUSED[response.status_code]}")
        return httpx2.Response(
            response.status_code,
            headers=response.headers,
            stream=_Bounded(response.stream, self._limits.reply_bytes),
            extensions=response.extensions,
            request=request,
        )

    async def aclose(self) -> None:
        await self._inner.aclose()


def _unreachable(request: httpx2.Request, error: httpx2.TransportError) -> httpx2.Response:
    said = {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": f"no answer: {type(error).__name__}"}}
    return httpx2.Response(503, json=said, request=request)


class _Bounded(httpx2.AsyncByteStream):
    """A body that ends early, instead of raising, when it breaks off or grows over the limit."""

    def __init__(self, inner: Any, limit_bytes: int) -> None:
        self._inner = inner
        self._limit = limit_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in self._inner:
                size += len(chunk)
                if size > self._limit:
                    mark_fault(f"its answer is longer than the limit of {self._limit} bytes")
                    return
                yield chunk
        except httpx2.TransportError:
            return

    async def aclose(self) -> None:
        await self._inner.aclose()


@asynccontextmanager
async def streams(url: str, headers: Mapping[str, str], limits: Limits) -> AsyncIterator[tuple[Any, Any]]:
    """The read and write stream for the SDK's `Client`, to a running server, with `headers` on each request."""
    timeout = httpx2.Timeout(limits.write_s, read=limits.read_s)
    async with (
        httpx2.AsyncClient(transport=_Contained(limits), headers=dict(headers), timeout=timeout) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=limits.reply_bytes) as both,
    ):
        yield _Mended(both[0]), both[1]


class _Mended:
    """The SDK's read stream, through which catalogues come mended."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def receive(self) -> Any:
        return mended(await self._inner.receive())

    async def aclose(self) -> None:
        await self._inner.aclose()

    def __aiter__(self) -> _Mended:
        return self

    async def __anext__(self) -> Any:
        return mended(await anext(self._inner))

    async def __aenter__(self) -> _Mended:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
