"""The ticket server: two MCP tools over `Tickets`, on standard input and output or on HTTP with a bearer token.

Knows nothing of runs, models or budgets; it trusts no client and checks every argument again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import CallToolResult, ToolAnnotations

import miniharness
from miniharness import faults
from miniharness.errors import TRY_AGAIN, HarnessError, StoreError
from miniharness.mcp.stdio import serve
from miniharness.mcp.wire import TOKEN
from miniharness.server.extension import OutcomeMethod, answer, failure, marker, operation
from model import validate_action
from store import Found, Ticket, Tickets

LOOPBACK = ("127.0.0.1", "localhost", "::1")
READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
WRITES = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
CREATE = "create_review_ticket"

Reply = Annotated[CallToolResult, Found]


def build(tickets: Tickets, fault: str | None = None) -> MCPServer:
    """The server over an open store. Calls that arrive together share a commit; each is done whole or not at all."""

    async def outcome(key: str, epoch: int | None) -> Mapping[str, Any] | None:
        found = await tickets.together(lambda: tickets.look_up(key, epoch))
        return {"tool": CREATE, "arguments": found.action.model_dump(), "result": _shown(found)} if found else None

    server = MCPServer(
        "review-tickets", version=miniharness.__version__, log_level="WARNING", extensions=[OutcomeMethod(outcome)]
    )

    @server.tool(annotations=READS)
    async def lookup_review_ticket(operation_key: str, ctx: Context) -> Reply:
        """Find the review ticket of an operation key; the answer's ticket is null when there is none."""
        return await _reply(tickets, lambda: tickets.look_up(*_attempt(ctx)))

    @server.tool(name=CREATE, annotations=WRITES, meta=marker("operation_key"))
    async def create_review_ticket(operation_key: str, source: str, title: str, ctx: Context) -> Reply:
        """Create the review ticket of an operation key; the same key and content again returns the same ticket."""
        action = {"source": source, "title": title}

        def create() -> Ticket:
            key, epoch = _attempt(ctx)
            return tickets.create(key, validate_action(action), epoch)

        reply = await _reply(tickets, create)
        if not reply.is_error:
            faults.reach(faults.SERVER_AFTER_COMMIT, fault)
        return reply

    return server


def _attempt(ctx: Context) -> tuple[str, int | None]:
    """The operation's key, and the epoch of who asks."""
    asked = operation(ctx.request_context, "operation_key")
    return asked.key, asked.epoch


async def _reply(tickets: Tickets, work: Callable[[], Ticket | None]) -> CallToolResult:
    """What the work gives as an answer, or why it was refused."""
    try:
        return answer(_shown(await tickets.together(work)))
    except HarnessError as error:
        return failure(error, _shown(None))


def _shown(ticket: Ticket | None) -> dict[str, Any]:
    return Found(ticket=ticket).model_dump(exclude_unset=True)


Asgi = Callable[[dict[str, Any], Any, Callable[[dict[str, Any]], Awaitable[None]]], Awaitable[None]]


def guarded(app: Asgi, token: str) -> Asgi:
    """`app` for those who send the bearer token; everybody else gets 401 and learns nothing."""
    wanted = f"Bearer {token}".encode()

    async def guard(scope: dict[str, Any], receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        if scope["type"] == "http":
            sent = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(sent, wanted):
                headers = [(b"www-authenticate", b"Bearer"), (b"content-length", b"0")]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": b""})
                return
        await app(scope, receive, send)

    return guard


def serve_http(server: MCPServer, host: str, port: int, token: str) -> None:
    """Serve until a signal; only requests for this very host and port pass (protection against DNS rebinding)."""
    import uvicorn

    names = ("127.0.0.1", "localhost", "[::1]") if host in LOOPBACK else (host,)
    security = TransportSecuritySettings(
        allowed_hosts=[f"{name}:{port}" for name in names],
        allowed_origins=[f"http://{name}:{port}" for name in names],
    )
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    app = server.streamable_http_app(json_response=True, stateless_http=True, transport_security=security, host=host)
    print(f"listening on http://{host}:{port}/mcp", file=sys.stderr, flush=True)
    config = uvicorn.Config(guarded(app, token), log_level="warning", access_log=False)  # type: ignore[arg-type]
    uvicorn.Server(config).run(sockets=[listening])


def main(argv: list[str] | None = None) -> int:
    """Run the server; the exit code is 2 for a wrong command and 75 for an unusable database."""
    parser = argparse.ArgumentParser(prog="server.py", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--db", type=Path, required=True, metavar="PATH", help="the SQLite file of the tickets")
    parser.add_argument("--transport", choices=("stdio", "http"), default="stdio")
    parser.add_argument("--host", default="127.0.0.1", help="for http (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8765, help="for http (default: %(default)s)")
    args = parser.parse_args(argv)
    token = os.environ.get(TOKEN, "")
    if not 1 <= args.port <= 65535:
        parser.error("--port must be from 1 to 65535")
    if args.transport == "http" and not token:
        where = "" if args.host in LOOPBACK else f", all the more on {args.host}, which others can reach"
        parser.error(f"--transport http needs a bearer token in the environment variable {TOKEN}{where}")
    try:
        tickets = Tickets(args.db)
    except StoreError as error:
        print(f"server.py: {error}", file=sys.stderr)
        return error.exit_code
    server = build(tickets, os.environ.get(faults.ENVIRONMENT))
    if args.transport == "stdio":
        asyncio.run(serve(server))
        return 0
    try:
        serve_http(server, args.host, args.port, token)
    except OSError as error:
        print(
            f"server.py: {args.host} port {args.port} cannot be used: {error.strerror}; choose another", file=sys.stderr
        )
        return TRY_AGAIN
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # every write is committed; the client need not wait for the SDK's teardown
