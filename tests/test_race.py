"""Two processes and one run: a frozen owner that thaws, a write that comes too late, two at once, and signals."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import GOAL, Lab
from forked import ROOT, Forked
from killed_at import PROGRAM

import lab as program
from miniharness.errors import ToolUnavailable
from store import Runs

pytestmark = pytest.mark.process
RUN = "review-001"
ONE_TICKET = [(f"{RUN}:ticket", GOAL)]
TOKEN = "MINIHARNESS_TOKEN"


def frozen(process: Forked) -> bool:
    """Wait until the process is stopped."""
    for _ in range(500):
        if Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
            return True
        time.sleep(0.02)
    return False


def ended(process: Forked) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON answer of a process."""
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return process.returncode, json.loads(out)


def proven(state_dir: Path) -> None:
    """The history of the run gives its row."""
    runs = Runs(state_dir)
    assert runs.replay(RUN) == []
    runs.close()


# -- a frozen owner ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper(lab: Lab) -> Iterator[Forked]:
    """A command that froze with its intent on disk and its request not yet sent; its server lives."""
    process = lab.start("--dispatch", "stop", "--execute", "--json", program=(PROGRAM,))
    assert frozen(process)
    yield process
    process.kill()
    process.wait()


def _thawed(process: Forked) -> tuple[int, dict[str, Any]]:
    process.send_signal(signal.SIGCONT)
    return ended(process)


def test_a_frozen_owner_is_busy_and_a_take_over_replaces_it(lab: Lab, sleeper: Forked) -> None:
    """K3: frozen is alive; a forced take-over finishes; thawed, the old one is refused by the journal and says so."""
    busy = lab.run("--execute", "--json")
    told = json.loads(busy.stdout)
    assert busy.returncode == 75
    assert (told["interrupted"]["error"], told["next"]["action"]) == ("RunBusy", "wait")
    assert f"process {sleeper.pid}," in told["interrupted"]["message"]
    assert (told["state"], told["attempts"], lab.tickets()) == ("dispatching", 1, [])

    taken = lab.json("--execute", "--take-over")
    assert (taken["state"], taken["attempts"], lab.tickets()) == ("succeeded", 2, ONE_TICKET)
    code, late = _thawed(sleeper)
    assert (code, late["interrupted"]["error"]) == (75, "Fenced")
    assert "taken over by another process" in late["interrupted"]["message"]
    assert (late["state"], late["events"]) == ("succeeded", taken["events"])
    assert lab.tickets() == ONE_TICKET
    proven(lab.state_dir)


def test_a_thawed_request_creates_nothing_after_a_cancel(lab: Lab, sleeper: Forked) -> None:
    """K3: cancelled means that nothing can still land, also not the request of an owner that was frozen meanwhile."""
    assert lab.operate("cancel", RUN).returncode == 0
    cancelled = lab.run("--take-over", "--json")
    assert (cancelled.returncode, json.loads(cancelled.stdout)["state"]) == (1, "cancelled")
    code, late = _thawed(sleeper)
    assert (code, late["interrupted"]["error"], late["state"]) == (75, "Fenced", "cancelled")
    assert lab.tickets() == []
    proven(lab.state_dir)


def test_an_owner_that_thaws_without_a_take_over_goes_on(lab: Lab, sleeper: Forked) -> None:
    """A freeze alone costs nothing: the run was left alone and its owner finishes with one attempt."""
    assert lab.run("--execute").returncode == 75
    code, told = _thawed(sleeper)
    assert (code, told["state"], told["attempts"]) == (0, "succeeded", 1)
    assert lab.tickets() == ONE_TICKET


@pytest.mark.parametrize("when", ["insert into events#6", "commit#7"])
def test_an_owner_frozen_inside_a_commit_holds_the_file_and_loses_nothing(lab: Lab, when: str) -> None:
    """Frozen with the write lock: others are told that the file is locked; killed there, the next one takes it."""
    process = lab.start("--engine", f"stop@{when}", "--execute", program=(PROGRAM,))
    assert frozen(process)
    assert lab.json("--execute", "--take-over")["interrupted"]["error"] == "StoreError"
    process.kill()
    process.communicate()
    assert lab.json("--execute")["state"] == "succeeded"
    assert lab.tickets() == ONE_TICKET
    proven(lab.state_dir)


# -- a write on the wire -----------------------------------------------------------------------------------------------


class Wire:
    """An HTTP proxy before the ticket server, which holds the first write until `release`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.held = asyncio.Event()
        self.release = asyncio.Event()
        self.late = asyncio.get_running_loop().create_future()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith((b"host:", b"connection:"))]
        sizes = [int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")]
        body = await reader.readexactly(sum(sizes))
        delayed = b'"create_review_ticket"' in body and not self.held.is_set()
        if delayed:
            self.held.set()
            await self.release.wait()
        lines[1:1] = [f"Host: 127.0.0.1:{self._port}".encode(), b"Connection: close"]
        upstream, sending = await asyncio.open_connection("127.0.0.1", self._port)
        sending.write(b"\r\n".join(lines) + body)
        answer = await upstream.read()
        sending.close()
        if delayed:
            self.late.set_result(answer.partition(b"\r\n\r\n")[2].decode())
        elif not writer.is_closing():
            writer.write(answer)
        writer.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@asynccontextmanager
async def wired(state_dir: Path) -> AsyncIterator[tuple[Wire, tuple[str, ...]]]:
    """The ticket server on HTTP, in a process of its own, behind a wire; with the arguments that lead there."""
    state_dir.mkdir()
    port = _free_port()
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "server.py", "--db", str(state_dir / "tickets.sqlite")),
        *("--transport", "http", "--port", str(port)),
        cwd=ROOT,
        env=os.environ | {TOKEN: "secret"},
    )
    try:
        async with asyncio.timeout(30):
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                await asyncio.sleep(0.05)
        wire = Wire(port)
        async with await asyncio.start_server(wire, "127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/mcp"
            yield wire, ("--transport", "http", "--url", url, "--json")
    finally:
        server.kill()
        await server.wait()


@pytest.mark.parametrize("then", ["resume", "wait for a permit", "cancel"])
async def test_a_write_that_arrives_after_the_look_up_is_refused_by_the_server(lab: Lab, then: str) -> None:
    """K4: the request of a killed engine is still on the wire when the next one finds nothing; then it arrives."""
    async with wired(lab.state_dir) as (wire, where):
        process = lab.start("--execute", *where, **{TOKEN: "secret"})
        async with asyncio.timeout(60):
            await wire.held.wait()
        process.kill()
        process.communicate()
        if then == "cancel":
            assert lab.operate("cancel", RUN).returncode == 0
        args = (*where, "--execute") if then == "resume" else where
        resumed = await asyncio.to_thread(lab.json, *args, **{TOKEN: "secret"})
        before = lab.tickets()
        wire.release.set()
        async with asyncio.timeout(60):
            answer = json.loads(await wire.late)
        assert answer["result"]["structuredContent"]["error"]["code"] == "stale"
        assert lab.tickets() == before
        wanted = {"resume": "succeeded", "wait for a permit": "waiting_execution", "cancel": "cancelled"}[then]
        assert (resumed["state"], before) == (wanted, ONE_TICKET if then == "resume" else [])
        if then == "wait for a permit":
            last = await asyncio.to_thread(lab.json, *where, "--execute", **{TOKEN: "secret"})
            assert (last["state"], last["attempts"], lab.tickets()) == ("succeeded", 2, ONE_TICKET)
    proven(lab.state_dir)


# -- two at once -------------------------------------------------------------------------------------------------------


def test_two_commands_that_start_at_once_make_one_ticket(tmp_path: Path) -> None:
    """K12: on a fresh folder one drives; the other names it and exits 75, or comes late and reads the finished run."""
    for attempt in range(3):
        lab = Lab(tmp_path / str(attempt))
        both = [lab.start("--execute", "--json") for _ in range(2)]
        answers = [ended(process) for process in both]
        codes = sorted(code for code, _ in answers)
        assert codes in ([0, 75], [0, 0])
        for process, (code, told) in zip(both, answers, strict=True):
            other = both[process is both[0]]
            if code == 75:
                assert told["interrupted"]["error"] == "RunBusy"
                assert f"process {other.pid}," in told["interrupted"]["message"]
            else:
                assert (told["state"], told["attempts"]) == ("succeeded", 1)
        assert lab.tickets() == ONE_TICKET
        proven(lab.state_dir)


# -- signals -----------------------------------------------------------------------------------------------------------


class Provider(ThreadingHTTPServer):
    """The Messages API's stand-in: it says nothing to the first request and answers every other one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Messages)
        self.asked = threading.Event()
        self.closing = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client is gone; nobody minds."""


class _Messages(BaseHTTPRequestHandler):
    server: Provider

    def do_POST(self) -> None:
        first = not self.server.asked.is_set()
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.set()
        if first:
            self.server.closing.wait()
            return
        call = {"type": "tool_use", "id": "toolu_1", "name": request["tool_choice"]["name"], "input": GOAL}
        usage = {"input_tokens": 1, "output_tokens": 1}
        body = {"id": "msg_1", "type": "message", "role": "assistant", "model": request["model"], "usage": usage}
        data = json.dumps(body | {"content": [call], "stop_reason": "tool_use", "stop_sequence": None}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Say nothing."""


@pytest.fixture
def provider() -> Iterator[Provider]:
    serving = Provider()
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield serving
    serving.closing.set()
    serving.shutdown()
    thread.join()
    serving.server_close()


WHERE = {
    "planned": "hang@insert into operation_fences",
    "reconciling": "hang@insert into operation_fences#2",
    "waiting_execution": "hang@insert into operation_fences",
    "dispatching": "hang@insert into tickets",
}


def _next(lab: Lab, told: dict[str, Any], **env: str) -> None:
    """Type the next command that was told, and see the run end well."""
    command = shlex.split(told["next"]["command"])
    assert command[:2] == ["python", "lab.py"]
    command += [] if "--execute" in command else ["--execute"]
    done = subprocess.run(
        [sys.executable, *command[1:], "--json"],
        cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "succeeded"
    assert lab.tickets() == ONE_TICKET
    proven(lab.state_dir)


SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)


@pytest.mark.parametrize(
    ("state", "number"),
    [(state, signal.SIGINT) for state in WHERE]
    + [pytest.param(state, signal.SIGTERM, marks=pytest.mark.slow) for state in WHERE],
)
def test_a_signal_while_the_server_is_slow_stops_with_the_state_and_the_next_command(
    lab: Lab, state: str, number: signal.Signals
) -> None:
    """K17: in each state in which a server can keep us waiting, a signal ends the wait and the next command works."""
    if state == "waiting_execution":
        assert lab.run().returncode == 0
    process = lab.start("--server", WHERE[state], "--execute", "--json", program=(PROGRAM,))
    assert process.says("server: hang")
    process.send_signal(number)
    code, told = ended(process)
    assert (code, told["state"], told["interrupted"]["error"]) == (75, state, "Interrupted")
    assert number.name in told["interrupted"]["message"]
    assert told["next"]["action"] in ("resume", "execute")
    _next(lab, told)


@SIGNALS
def test_a_signal_while_the_model_is_slow_keeps_the_run_new(
    lab: Lab, provider: Provider, number: signal.Signals
) -> None:
    """K17: nobody waits for a model that does not answer; the request stays debited and the next command asks again."""
    env = {"ANTHROPIC_BASE_URL": f"http://127.0.0.1:{provider.server_port}", "ANTHROPIC_API_KEY": "test"}
    ask = ("--provider", "anthropic", "--model", "claude-opus-5-5", "--execute", "--json")
    process = lab.start(*ask, **env)
    assert provider.asked.wait(30)
    process.send_signal(number)
    code, told = ended(process)
    assert (code, told["state"], told["interrupted"]["error"]) == (75, "new", "Interrupted")
    assert told["budget"]["model_requests"]["spent"] == 1
    _next(lab, told, **env)


@pytest.mark.parametrize("at", [8, 33, 53])
def test_a_signal_before_any_statement_ends_in_order(tmp_path: Path, at: int) -> None:
    """K17: a signal that comes at one statement or another is answered, and what was told next then works."""
    number = signal.SIGTERM if at % 2 else signal.SIGINT
    lab = Lab(tmp_path / "state")
    process = lab.start("--engine", f"stop@{at}", "--execute", "--json", program=(PROGRAM,))
    assert frozen(process)
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    code, told = ended(process)
    if told["state"] == "succeeded":
        assert (code, told["interrupted"]) == (0, None)
        assert lab.tickets() == ONE_TICKET
    elif told["state"] is None:
        assert code == 75
        assert lab.json("--execute")["state"] == "succeeded"
    else:
        assert (code, told["interrupted"]["error"]) == (75, "Interrupted")
        _next(lab, told)


@SIGNALS
def test_a_signal_while_a_finished_run_is_read_changes_nothing(lab: Lab, number: signal.Signals) -> None:
    """K17: what has ended stays ended, and the answer is the stored one."""
    first = lab.json("--execute")
    process = lab.start("--engine", "stop@select run, seq", "--json", program=(PROGRAM,))
    assert frozen(process)
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    assert ended(process) == (0, first)


def test_a_second_signal_ends_the_command_at_once(lab: Lab) -> None:
    """Whoever presses Ctrl-C twice does not wait for a server to be closed in order; the run can go on all the same."""
    process = lab.start("--server", "hang@insert into tickets", "--execute", "--json", program=(PROGRAM,))
    assert process.says("server: hang")
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    out, _ = process.communicate()
    assert (process.returncode, out) == (75, "")
    told = lab.json("--execute")
    assert (told["state"], lab.tickets()) == ("succeeded", ONE_TICKET)


# -- after the end -----------------------------------------------------------------------------------------------------


async def test_a_finished_run_needs_no_server_and_no_key(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """K16: executed again, it returns the stored outcome; nothing is started and nobody is asked."""
    first = await asyncio.to_thread(lab.json, "--execute")
    monkeypatch.setattr(program, "SERVER", Path("/nowhere/server.py"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    files = sorted((path.name, path.stat().st_size) for path in lab.state_dir.glob("*.sqlite"))
    assert await program.execute(lab.state_dir, execute_write=True) == first
    assert sorted((path.name, path.stat().st_size) for path in lab.state_dir.glob("*.sqlite")) == files
    with pytest.raises(ToolUnavailable):
        program.session_for(lab.state_dir)


def test_a_ticket_that_disappears_after_success_is_not_made_again(lab: Lab) -> None:
    """K24: the outcome was true when it was checked; it stays, and nothing is re-created."""
    assert lab.run("--execute").returncode == 0
    with closing(sqlite3.connect(lab.state_dir / "tickets.sqlite")) as world:
        world.execute("delete from tickets")
        world.commit()
    again = lab.run("--execute", "--json")
    assert (again.returncode, json.loads(again.stdout)["state"]) == (0, "succeeded")
    assert lab.tickets() == []
