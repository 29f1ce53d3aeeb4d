"""The tool side against servers that misbehave: a call fails alone, within its limit, and says whether it was sent."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fake_server
import pytest
from conftest import GOAL
from forked import ROOT
from pydantic import BaseModel

import lab
from miniharness.contract import Budget
from miniharness.errors import ToolUnavailable
from miniharness.machine import Outcome
from miniharness.mcp.child import Child
from miniharness.mcp.session import CallFailed, Session, http_session, stdio_session
from miniharness.mcp.wire import TOKEN, Limits
from miniharness.report import exit_code
from store import Runs

FAKE = [sys.executable, "-S", str(Path(__file__).with_name("fake_server.py"))]
SHORT = Limits(handshake_s=20, write_s=10, read_s=1, close_s=0.3)
AUTHORIZED = {"Authorization": "Bearer token"}
PATIENT = Limits(handshake_s=20, write_s=10, read_s=30, close_s=0.3)
WELL_BEFORE_S = 10.0  # what is "at once" on a busy machine, against limits of 20 and 30 s

Report = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """What is timed here is the transport, not the import of the SDK."""
    import miniharness.mcp.http
    import miniharness.mcp.stdio  # noqa: F401


class Said(BaseModel):
    """The answer of the fake server's own tools."""

    text: str


async def say(session: Session, tool: str, **arguments: str) -> str:
    """Call one of the fake server's own tools."""
    return await session.call(tool, arguments, lambda result: Said.model_validate(result.structured_content).text, {})


@asynccontextmanager
async def connected(*flags: str, limits: Limits = PATIENT) -> AsyncIterator[tuple[Child, Session]]:
    """A child running the fake server, and an open session with it."""
    child = Child([*FAKE, *flags])
    async with stdio_session(child, limits, "legacy") as session:
        await session.connect({})
        yield child, session


@asynccontextmanager
async def unharmed(session: Session) -> AsyncIterator[None]:
    """Two calls are in flight around the block, and get their answers when a third follows (`--batch 3`)."""
    waiting = [asyncio.create_task(say(session, "echo", text=name)) for name in "ab"]
    try:
        await say(session, "ping")
        yield
        assert not any(call.done() for call in waiting)
        assert [await say(session, "echo", text="c"), *await asyncio.gather(*waiting)] == ["c", "a", "b"]
    finally:
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def is_gone(pid: int) -> bool:
    """Whether that process runs no more; a zombie that nobody has buried does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition: Callable[[], bool], limit_s: float = 10) -> bool:
    """Poll until it holds; whether it did within the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


class World:
    """A state folder, and a lab that gets its ticket server from here."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch

    async def execute(
        self, *flags: str, argv: list[str] | None = None, limits: Limits = PATIENT, mode: str = "legacy", **given: Any
    ) -> Report:
        """`lab.execute` with a permit and the fake server, or `argv`."""
        command = argv or [*FAKE, "--db", str(self.folder / "tickets.json"), *flags]
        self._monkeypatch.setattr(lab, "session_for", lambda *_: stdio_session(Child(command), limits, mode))
        return await lab.execute(self.folder, **{"execute_write": True} | given)

    def tickets(self) -> Report:
        """What the fake server has on its disk."""
        path = self.folder / "tickets.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def faults(self) -> list[str]:
        """What replaying the history finds wrong."""
        runs = Runs(self.folder)
        try:
            return runs.replay(lab.RUN)
        finally:
            runs.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


ONE_TICKET = {f"{lab.RUN}:ticket": {"id": 1, "action": GOAL}}


def details(report: Report, kind: str) -> list[Report]:
    """The details of every event of that type."""
    return [event["detail"] for event in report["events"] if event["type"] == kind]


# -- what a write's answer is worth ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3])
async def test_a_server_that_reports_success_and_writes_nothing_never_makes_a_run_succeed(
    world: World, limit: int
) -> None:
    """A liar costs the whole dispatch budget and no more, and the run ends where a person has to decide."""
    report = await world.execute("--create", "liar", budget=Budget(dispatches=limit))
    assert (report["state"], report["attempts"], exit_code(report)) == ("reconcile_required", limit, 3)
    assert [d["outcome"] for d in details(report, "dispatch_answered")] == [Outcome.RETURNED] * limit
    assert world.tickets() == {}
    again = await world.execute("--create", "liar", budget=Budget(dispatches=limit))
    assert (again["state"], again["attempts"]) == ("reconcile_required", limit)
    assert world.faults() == []


@pytest.mark.parametrize(
    "answer",
    [
        "broken-schema", "no-structure", "error-without-code", "error-with-another-code", "unlisted-content",
        "no-content", "rpc-error", "not-a-result",
    ],
)  # fmt: skip
async def test_a_write_with_an_unusable_answer_is_unknown_and_then_found(world: World, answer: str) -> None:
    """Whatever the answer looks like, it is no verdict: the look-up finds the ticket and one attempt was enough."""
    report = await world.execute("--create", answer, limits=SHORT)
    assert [d["outcome"] for d in details(report, "dispatch_answered")] == [Outcome.UNKNOWN]
    assert (report["state"], report["attempts"], report["interrupted"]) == ("succeeded", 1, None)
    assert world.tickets() == ONE_TICKET
    assert world.faults() == []


async def test_a_refusal_by_a_server_that_wrote_all_the_same_does_not_fail_the_run(world: World) -> None:
    """Even an error that is declared clean decides nothing while the ticket is there."""
    report = await world.execute("--create", "refused-after-writing")
    assert [d["outcome"] for d in details(report, "dispatch_answered")] == [Outcome.REFUSED]
    assert (report["state"], report["attempts"], world.tickets()) == ("succeeded", 1, ONE_TICKET)


async def test_a_write_that_is_never_answered_is_looked_up_after_the_read_limit(world: World) -> None:
    """A silent write costs the read limit, not the run."""
    report = await world.execute("--create", "silent", limits=SHORT)
    assert details(report, "dispatch_answered") == [
        {"outcome": Outcome.UNKNOWN, "message": "create_review_ticket: no answer within 1 s"}
    ]
    assert (report["state"], report["attempts"], world.tickets()) == ("succeeded", 1, ONE_TICKET)


async def test_a_server_that_dies_of_the_write_is_looked_up_by_the_next_command(world: World) -> None:
    """The death is told in the history, this command stops with 75, and the next one finds the one ticket."""
    report = await world.execute("--create", "dies")
    (answered,) = details(report, "dispatch_answered")
    assert answered["outcome"] == Outcome.UNKNOWN
    assert "the server is gone: it was killed by signal 9" in answered["message"]
    assert (report["state"], report["attempts"], exit_code(report)) == ("reconciling", 1, 75)
    again = await world.execute()
    assert (again["state"], again["attempts"], world.tickets()) == ("succeeded", 1, ONE_TICKET)


HUGE = """
import asyncio, json, sys, time
from pathlib import Path
import mcp, lab
from miniharness.mcp.child import Child
from miniharness.mcp.session import stdio_session
from miniharness.mcp.wire import Limits

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])

before, start = peak(), time.monotonic()
lab.session_for = lambda *_: stdio_session(Child(sys.argv[2:]), Limits(), "legacy")
report = asyncio.run(lab.execute(Path(sys.argv[1]), execute_write=True))
print(json.dumps({"report": report, "grown_kb": peak() - before, "took_s": time.monotonic() - start}))
"""


@pytest.mark.process
async def test_a_reply_of_100_mb_is_refused_in_bounded_memory_and_looked_up_later(world: World) -> None:
    """The reader stops at its limit and says so; the next command finds the ticket, with one attempt."""
    command = [*FAKE, "--db", str(world.folder / "tickets.json"), "--create", "huge"]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", HUGE, str(world.folder), *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    print({name: told[name] for name in ("grown_kb", "took_s")})
    assert told["grown_kb"] < 100_000
    assert told["took_s"] < 20
    (answered,) = details(told["report"], "dispatch_answered")
    assert answered["outcome"] == Outcome.UNKNOWN
    assert f"longer than the limit of {Limits().reply_bytes} bytes" in answered["message"]
    assert exit_code(told["report"]) == 75
    report = await world.execute()
    assert (report["state"], report["attempts"], world.tickets()) == ("succeeded", 1, ONE_TICKET)


# -- the handshake -----------------------------------------------------------------------------------------------------

HANDSHAKES = {
    "never answers": (["--start", "silent"], r"did not finish its handshake within 0\.5 s"),
    "exits at start": (["--start", "exit"], "the server is gone: it ended with exit code 3"),
    "a version of the future": (["--version", "2099-01-01"], "2099-01-01"),
    "a version too old": (
        ["--version", "2024-11-05"], "speaks protocol 2024-11-05; accepted are 2025-11-25, 2026-07-28",
    ),
    "no look-up": (["--without", "lookup_review_ticket"], "offers no tool lookup_review_ticket"),
    "no write": (["--without", "create_review_ticket"], "offers no tool create_review_ticket"),
    "a broken write": (["--broken", "create_review_ticket"], "create_review_ticket is set aside: its entry breaks"),
    "an optional key": (["--optional-key"], "does not require operation_key"),
}  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), HANDSHAKES.values(), ids=HANDSHAKES)
@pytest.mark.parametrize("mode", ["legacy", pytest.param("auto", marks=pytest.mark.process)])
async def test_a_failed_handshake_stops_with_75_and_loses_nothing(
    world: World, flags: list[str], message: str, mode: str
) -> None:
    """The reason is clear and comes within the limit; the proposal is kept, and the next command goes on from it."""
    limits = Limits(handshake_s=0.5 if "silent" in flags else 20, close_s=0.3)
    start = time.monotonic()
    stopped = await world.execute(*flags, limits=limits, mode=mode)
    assert time.monotonic() - start < WELL_BEFORE_S
    assert stopped["interrupted"]["error"] == ToolUnavailable.__name__
    assert re.search(message, stopped["interrupted"]["message"])
    assert (stopped["state"], stopped["attempts"], exit_code(stopped)) == ("planned", 0, 75)
    assert stopped["proposal"] == GOAL
    report = await world.execute()
    assert (report["state"], report["attempts"], world.tickets()) == ("succeeded", 1, ONE_TICKET)
    assert report["budget"]["model_requests"]["spent"] == 1
    assert report["events"][: len(stopped["events"])] == stopped["events"]


@pytest.mark.parametrize("mode", ["legacy", pytest.param("auto", marks=pytest.mark.process)])
async def test_a_broken_tool_loses_no_other(world: World, mode: str) -> None:
    """T6: whatever stands in its entry, the tools beside it are used."""
    era = "2025-11-25" if mode == "legacy" else "2026-07-28"
    report = await world.execute("--broken", "another_tool", "--era", era, mode=mode)
    assert (report["state"], world.tickets()) == ("succeeded", ONE_TICKET)


async def test_a_command_that_does_not_exist_is_named_and_nothing_is_changed(world: World) -> None:
    """A server that cannot be started is the reason that the report gives."""
    stopped = await world.execute(argv=["no-such-server"])
    assert "there is no command 'no-such-server'" in stopped["interrupted"]["message"]
    assert (stopped["attempts"], exit_code(stopped)) == (0, 75)
    assert (await world.execute())["state"] == "succeeded"


@pytest.mark.parametrize("junk", fake_server.JUNK)
async def test_what_is_no_message_on_the_output_is_passed_over(world: World, junk: str) -> None:
    """Banners, blank lines, log lines, a bare JSON list and bytes that are not UTF-8 disturb no message."""
    report = await world.execute("--junk", junk)
    assert (report["state"], report["attempts"], world.tickets()) == ("succeeded", 1, ONE_TICKET)


@pytest.mark.parametrize(
    ("mode", "era"), [("legacy", "2025-11-25"), ("auto", "2025-11-25"), ("auto", "2026-07-28")]
)  # fmt: skip
async def test_the_history_tells_the_protocol_that_was_agreed(world: World, mode: str, era: str) -> None:
    """Both eras work, also when the newer one is tried first, and the `connected` event names the one in use."""
    report = await world.execute("--era", era, mode=mode)
    assert details(report, "connected") == [{"protocol": era, "server": "fake"}]
    assert (report["state"], world.tickets()) == ("succeeded", ONE_TICKET)


@pytest.mark.process
@pytest.mark.parametrize(("mode", "era"), [("legacy", "2025-11-25"), ("auto", "2026-07-28")])
async def test_the_ticket_server_speaks_both_protocols(world: World, mode: str, era: str) -> None:
    """Our own server is found by the old handshake and by the new one, with the same result."""
    argv = [sys.executable, str(lab.SERVER), "--db", str(world.folder / "tickets.sqlite")]
    report = await world.execute(argv=argv, mode=mode)
    assert details(report, "connected") == [{"protocol": era, "server": "review-tickets"}]
    assert (report["state"], report["attempts"], report["ticket"]["action"]) == ("succeeded", 1, GOAL)


# -- one call, and the others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b"])
async def test_a_lone_surrogate_fails_its_own_call_unsent_and_no_other(text: str) -> None:
    """Calls in flight on the same session get their answers, and so do later ones."""
    async with connected("--batch", "3") as (_, session), unharmed(session):
        with pytest.raises(CallFailed, match="not Unicode") as failed:
            await say(session, "echo", text=text)
        assert failed.value.sent is False
        assert ascii(text)[1:-1] not in str(failed.value)


async def test_an_answer_with_half_a_surrogate_pair_is_delivered() -> None:
    """The half becomes U+FFFD; the answer around it counts."""
    async with connected() as (_, session):
        assert await say(session, "half") == "private \N{REPLACEMENT CHARACTER}"


async def test_each_of_200_calls_at_once_gets_its_own_answer() -> None:
    """All are on the wire before the first is answered, and they are answered last first."""
    async with connected("--batch", "200") as (_, session):
        names = [f"call {number}" for number in range(200)]
        assert await asyncio.gather(*(say(session, "echo", text=name) for name in names)) == names


async def test_a_call_without_an_answer_ends_at_the_read_limit_and_the_session_lives_on() -> None:
    """The limit belongs to the call; the server is left alone."""
    async with connected(limits=SHORT) as (child, session):
        with pytest.raises(CallFailed, match="no answer within 1 s") as failed:
            await say(session, "hang")
        assert failed.value.sent is True
        assert await say(session, "echo", text="still here") == "still here"
        assert not child.died.is_set()


async def test_a_server_that_stops_reading_is_killed_at_the_write_limit() -> None:
    """A blocked pipe ends the call within the limit, as sent: part of it may have been read."""
    limits = Limits(handshake_s=20, write_s=0.3, read_s=30, close_s=0.3)
    async with connected(limits=limits) as (child, session):
        other = asyncio.create_task(say(session, "deaf"))
        await asyncio.sleep(0)  # its bytes go first
        start = time.monotonic()
        with pytest.raises(CallFailed, match=r"did not read its input for 0\.3 s") as failed:
            await say(session, "echo", text="x" * 4_000_000)
        with pytest.raises(CallFailed, match="the server is gone"):
            await other
        assert time.monotonic() - start < WELL_BEFORE_S
        assert failed.value.sent is True
        await asyncio.wait_for(child.died.wait(), WELL_BEFORE_S)
        assert is_gone(child.pid)


@pytest.mark.parametrize("known", ["dead", "dead, its pipe held open", "alive"])
async def test_sent_tells_whether_a_dead_server_may_have_got_the_call(known: str) -> None:
    """A server that was known dead got nothing; one that died with the call in flight may have acted on it."""
    async with connected() as (child, session):
        if "open" in known:
            await say(session, "grandchild")
        if known == "alive":
            call = asyncio.create_task(say(session, "hang"))
            await say(session, "ping")
            os.kill(child.pid, signal.SIGKILL)
        else:
            os.kill(child.pid, signal.SIGKILL)
            await asyncio.wait_for(child.died.wait(), WELL_BEFORE_S)
            call = asyncio.create_task(say(session, "hang"))
        with pytest.raises(CallFailed, match="the server is gone: it was killed by signal 9") as failed:
            await call
        assert failed.value.sent is (known == "alive")


async def test_a_death_is_seen_at_once_though_a_grandchild_keeps_the_pipe_open() -> None:
    """The call does not wait for an end of file that will not come, and the grandchild goes with the session."""
    async with connected() as (child, session):
        grandchild = int(await say(session, "grandchild"))
        call = asyncio.create_task(say(session, "hang"))
        await say(session, "ping")
        os.kill(child.pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(CallFailed, match="killed by signal 9"):
            await call
        seen_s = time.monotonic() - killed
        print(f"seen after {seen_s * 1000:.0f} ms; the read limit is {PATIENT.read_s:.0f} s")
        assert seen_s < 2
        assert not is_gone(grandchild)
    assert wait_for(lambda: is_gone(grandchild))


# -- a child's life ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ignored", "words", "ending"),
    [
        ((), ["eof"], "exit code 0"),
        (("eof",), ["eof", "term"], "exit code 0"),
        (("eof", "term"), ["eof", "term"], "signal 9"),
    ],
    ids=["leaves on its own", "ignores the end of its input", "ignores SIGTERM, too"],
)
async def test_a_server_is_gone_after_the_session_however_stubborn(
    tmp_path: Path, ignored: tuple[str, ...], words: list[str], ending: str
) -> None:
    """Each harder way to end it is used only when the softer one failed."""
    limits = Limits(close_s=0.5 if ignored else 10)
    flags = ["--log", str(tmp_path / "log"), *(f"--ignore={word}" for word in ignored)]
    async with connected(*flags, limits=limits) as (child, _):
        assert not is_gone(child.pid)
    assert is_gone(child.pid)
    assert ending in child.ending
    assert (tmp_path / "log").read_text().split() == words


PARENT = """
import signal, sys
from miniharness.mcp.child import Child
print(Child(sys.argv[1:]).pid, flush=True)
signal.pause()
"""
ORPHAN = """
import pathlib, sys, time
here = pathlib.Path(sys.argv[1])
(here / "started").touch()
while not (here / "go").exists():
    time.sleep(0.01)
(here / "effect").touch()
"""


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_does_not_outlive_a_killed_parent_and_writes_nothing_more(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A server in the middle of its work ends with us, so no orphan can write after the recovery has looked."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, sys.executable, "-c", ORPHAN, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        assert wait_for((tmp_path / "started").exists)
        assert not is_gone(pid)
        parent.send_signal(number)
        assert parent.wait(10) == -number
        assert wait_for(lambda: is_gone(pid))
        (tmp_path / "go").touch()
        assert not (tmp_path / "effect").exists()
    finally:
        parent.stdout.close()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def test_a_server_gets_none_of_our_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a child is a short list and what it is given; everything else stays here."""
    for name in ("ANTHROPIC_API_KEY", TOKEN, "AWS_SECRET_ACCESS_KEY", "PYTHONPATH"):
        monkeypatch.setenv(name, "a secret")
    child = Child(FAKE, {"GIVEN": "on purpose"})
    async with stdio_session(child, PATIENT, "legacy") as session:
        await session.connect({})
        environment = json.loads(await say(session, "environment"))
    assert environment["GIVEN"] == "on purpose"
    assert environment["PATH"] == os.environ["PATH"]
    assert "a secret" not in environment.values()


# -- HTTP --------------------------------------------------------------------------------------------------------------


class Rude(BaseHTTPRequestHandler):
    """The fake server over HTTP, whose tools can also drop the connection or answer without end."""

    protocol_version = "HTTP/1.1"
    brain: ClassVar[fake_server.Brain]
    lock: ClassVar[threading.Condition]
    due: ClassVar[dict[Any, dict[str, Any]]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if not body:  # the client broke off
            self.close_connection = True
            return
        message = json.loads(body)
        tool = (message.get("params") or {}).get("name")
        if "id" not in message:
            self._send(202, b"")
        elif tool == "drop":
            self.close_connection = True
        elif tool == "cut":
            self._send(200, b'{"jsonrpc": "2.0", "id"', length=1000)
            self.close_connection = True
        elif tool == "huge":
            self._send(200, json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": "private" * 300_000}).encode())
        elif tool == "page":
            self._send(200, b"<html>private</html>", kind="text/html")
        elif tool == "down":
            self._send(503, b"private", kind="text/plain")
        else:
            self._send(200, json.dumps(self._reply(message)).encode())

    def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to `message`, once it is due."""
        with self.lock:
            for reply in self.brain.answer(message):
                self.due[reply["id"]] = reply
            self.lock.notify_all()
            self.lock.wait_for(lambda: message["id"] in self.due, 20)
            return self.due.pop(message["id"])

    def do_GET(self) -> None:
        self._send(405, b"")

    def _send(self, status: int, body: bytes, kind: str = "application/json", length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(body)

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client broke off, as clients do
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def rude_server(*flags: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Its URL, and how to take it down."""
    rude = type("_Rude", (Rude,), {
        "brain": fake_server.Brain(fake_server.parse(list(flags))), "lock": threading.Condition(), "due": {},
    })  # fmt: skip
    server = ThreadingHTTPServer(("127.0.0.1", 0), rude)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    try:
        yield f"http://127.0.0.1:{server.server_port}/mcp", stop
    finally:
        stop()
        thread.join()


@pytest.mark.parametrize("era", ["2026-07-28", pytest.param("2025-11-25", marks=pytest.mark.process)])
@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("drop", "no answer"), ("cut", None), ("huge", "longer than the limit of 1000000 bytes"), ("page", None),
        ("down", None), ("half", None),
    ],
)  # fmt: skip
async def test_a_broken_http_answer_fails_its_own_call_as_sent_and_no_other(
    tool: str, message: str | None, era: str
) -> None:
    """A dropped, cut, endless or foreign answer leaves the other calls unharmed, and the error quotes none of it."""
    limits = Limits(read_s=20, reply_bytes=1_000_000)
    with rude_server("--batch", "3", "--era", era) as (url, _):
        async with http_session(url, AUTHORIZED, limits) as session:
            assert (await session.connect({}))["protocol"] == era
            start = time.monotonic()
            async with unharmed(session):
                with pytest.raises(CallFailed, match=message) as failed:
                    await say(session, tool)
                assert time.monotonic() - start < WELL_BEFORE_S
                assert failed.value.sent is True
                assert "private" not in str(failed.value)


async def test_a_lone_surrogate_over_http_fails_its_own_call_unsent_and_no_other() -> None:
    """What cannot be put into UTF-8 stays here, whatever the transport."""
    with rude_server("--batch", "3") as (url, _):
        async with http_session(url, AUTHORIZED, PATIENT) as session:
            await session.connect({})
            async with unharmed(session):
                with pytest.raises(CallFailed, match="not Unicode") as failed:
                    await say(session, "echo", text="\ud83d")
                assert failed.value.sent is False


async def test_a_refused_connection_is_a_clear_reason_and_not_a_cancellation() -> None:
    """Nobody listens: the tool is unavailable, at once."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/mcp"
    async with http_session(url, AUTHORIZED, PATIENT) as session:
        with pytest.raises(ToolUnavailable, match="nothing answers at http://"):
            await session.connect({})


@pytest.mark.parametrize("era", ["2026-07-28", pytest.param("2025-11-25", marks=pytest.mark.process)])
async def test_a_call_to_an_http_server_that_went_down_was_not_sent(era: str) -> None:
    """A refused connection proves that no byte of the call arrived."""
    with rude_server("--era", era) as (url, stop):
        async with http_session(url, AUTHORIZED, PATIENT) as session:
            await session.connect({})
            with pytest.raises(CallFailed):
                await say(session, "drop")
            stop()
            with pytest.raises(CallFailed, match="nothing answers at http://") as failed:
                await say(session, "echo", text="x")
            assert failed.value.sent is False
