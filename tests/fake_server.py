"""A ticket server of the standard library alone, which misbehaves as its flags say; it starts in some 20 ms.

Its tickets are one JSON file, `{operation_key: {"id", "action"}}`, so that every effect is visible in the world.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
NAMED = {"name": "fake", "version": "1"}
JUNK = {"text": b"Loading model weights... done\n\n[]\n", "latin": b"caf\xe9 \xff\xfe\x00\n"}


def _huge(ticket: Json) -> None:
    write(b'{"jsonrpc": "2.0", "id": 0, "result": "')
    for _ in range(100):
        write(b"x" * 1_000_000)
    write(b'"}\n')


def _rpc_error(ticket: Json) -> None:
    raise LookupError(-32000)


def structured(content: Json) -> Json:
    """A tool result with structured content."""
    return {"content": [{"type": "text", "text": "see the structure"}], "structuredContent": content}


def _error(code: str) -> Json:
    return structured({"error": {"code": code, "message": "it said no"}}) | {"isError": True}


ANSWERS: dict[str, Callable[[Json], Any]] = {
    "honest": lambda ticket: structured({"ticket": ticket}),
    "liar": lambda ticket: structured({"ticket": ticket}),  # without having written anything
    "broken-schema": lambda ticket: structured({"ticket": ticket | {"id": "one"}}),
    "no-structure": lambda ticket: {"content": [{"type": "text", "text": json.dumps({"ticket": ticket})}]},
    "error-without-code": lambda ticket: {"content": [{"type": "text", "text": "it broke"}], "isError": True},
    "error-with-another-code": lambda ticket: _error("store"),
    "refused-after-writing": lambda ticket: _error("invalid"),
    "unlisted-content": lambda ticket: structured({"ticket": ticket}) | {"content": [{"type": "hologram"}]},
    "no-content": lambda ticket: {},
    "not-a-result": lambda ticket: ["done"],
    "rpc-error": _rpc_error,
    "huge": _huge,
    "silent": lambda ticket: None,
    "dies": lambda ticket: os.kill(os.getpid(), signal.SIGKILL),
}
"""How `create_review_ticket` answers; None is no answer."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags; without any, the server is honest."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--db", type=Path, default=Path(os.devnull), help="the JSON file of the tickets")
    add("--era", choices=("2025-11-25", "2026-07-28"), default="2025-11-25")
    add("--version", help="answer `initialize` with this protocol version")
    add("--start", choices=("exit", "silent"), help="instead of serving")
    add("--junk", choices=JUNK, help="print this before every message")
    add("--without", help="offer no tool of that name")
    add("--broken", help="the catalogue's entry of that tool breaks the protocol")
    add("--optional-key", action="store_true", help="require no operation_key")
    add("--create", choices=ANSWERS, default="honest", help="how create_review_ticket works and answers")
    add("--ignore", choices=("eof", "term"), action="append", default=[])
    add("--log", type=Path, help="note here what asked the server to leave")
    add("--batch", type=int, default=1, help="hold the answers of `echo` until there are so many; last first")
    return parser.parse_args(argv)


class Brain:
    """What the server answers, over any transport."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.held: list[Json] = []

    def answer(self, message: Json) -> list[Json]:
        """Every reply that is due after `message`."""
        if "id" not in message or "method" not in message:
            return []
        kept: Json = {"jsonrpc": "2.0", "id": message["id"]}
        try:
            result = self._result(message["method"], message.get("params") or {})
        except LookupError as error:
            return [kept | {"error": {"code": error.args[0], "message": "no"}}]
        if result is None:
            return []
        if isinstance(result, dict) and self.flags.era == "2026-07-28":
            result = {"resultType": "complete"} | result
        reply = kept | {"result": result}
        if message.get("params", {}).get("name") != "echo":
            return [reply]
        self.held.append(reply)
        if len(self.held) < self.flags.batch:
            return []
        due, self.held = self.held[::-1], []
        return due

    def _result(self, method: str, params: Json) -> Any:
        legacy = self.flags.era == "2025-11-25"
        if method == "initialize" and legacy:
            version = self.flags.version or self.flags.era
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": NAMED}
        if method == "server/discover" and not legacy:
            cached = {"ttlMs": 0, "cacheScope": "private"}
            named = {"io.modelcontextprotocol/serverInfo": NAMED}
            return cached | {"supportedVersions": [self.flags.era], "capabilities": {"tools": {}}, "_meta": named}
        if method == "tools/list":
            cached = {} if legacy else {"ttlMs": 0, "cacheScope": "private"}
            return cached | {"tools": self._tools()}
        if method != "tools/call":
            raise LookupError(-32601)
        return getattr(self, "_" + params["name"])(**params["arguments"])

    def _tools(self) -> list[Any]:
        key = [] if self.flags.optional_key else ["operation_key"]
        wanted = {"lookup_review_ticket": key, "create_review_ticket": [*key, "source", "title"]}
        text = {"type": "string"}
        schemas = {
            name: {"type": "object", "properties": dict.fromkeys(names, text), "required": names}
            for name, names in wanted.items()
        }
        gone = {self.flags.without, self.flags.broken}
        tools: list[Any] = [{"name": n, "inputSchema": schema} for n, schema in schemas.items() if n not in gone]
        if self.flags.broken:
            tools += [{"name": self.flags.broken, "inputSchema": "nothing", "outputSchema": 7}, "no entry at all"]
        return tools

    # -- the tickets

    def _tickets(self) -> Json:
        return json.loads(self.flags.db.read_text()) if self.flags.db.exists() else {}

    def _lookup_review_ticket(self, operation_key: str) -> Json:
        return structured({"ticket": self._tickets().get(operation_key)})

    def _create_review_ticket(self, operation_key: str, source: str, title: str) -> Any:
        tickets = self._tickets()
        ticket = {"id": len(tickets) + 1, "action": {"source": source, "title": title}}
        if self.flags.create != "liar":
            self.flags.db.write_text(json.dumps(tickets | {operation_key: ticket}))
        return ANSWERS[self.flags.create](ticket)

    # -- tools for the transport's sake, which are offered to nobody

    def _echo(self, text: str) -> Json:
        return structured({"text": text})

    def _environment(self) -> Json:
        return structured({"text": json.dumps(dict(os.environ))})

    def _ping(self) -> Json:
        """An answer at once, which proves that everything sent before it was read."""
        return structured({"text": "pong"})

    def _half(self) -> Json:
        """Half of a surrogate pair; `json.dumps` escapes it."""
        return structured({"text": "private \ud83d"})

    def _hang(self) -> None:
        return None

    def _deaf(self) -> None:
        """Live on without reading."""
        while True:
            signal.pause()

    def _grandchild(self) -> Json:
        """Start a process that keeps the server's output open."""
        return structured({"text": str(subprocess.Popen(["sleep", "600"]).pid)})


def write(data: bytes) -> None:
    """Put bytes on the wire."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def main() -> None:
    """Serve standard input and output."""
    flags = parse()

    def note(word: str) -> None:
        if flags.log:
            with flags.log.open("a") as file:
                print(word, file=file)

    def told_to_leave(*_: object) -> None:
        note("term")
        if "term" not in flags.ignore:
            sys.exit(0)

    signal.signal(signal.SIGTERM, told_to_leave)
    if flags.start == "exit":
        sys.exit(3)
    brain = Brain(flags)
    for line in sys.stdin.buffer:
        if flags.start == "silent":
            continue
        for reply in brain.answer(json.loads(line)):
            write(JUNK.get(flags.junk, b""))
            write(json.dumps(reply).encode() + b"\n")  # escaped, so a lone surrogate can pass
    note("eof")
    while "eof" in flags.ignore:
        time.sleep(600)


if __name__ == "__main__":
    main()
