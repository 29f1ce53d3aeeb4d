"""The ticket server through the SDK's client and as a real HTTP process: what it writes, refuses and hides."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from conftest import GOAL, tickets
from forked import ROOT
from jsonschema import Draft202012Validator
from mcp import Client
from mcp.types import CallToolResult

import lab as ticket_lab
import model
import server as ticket_server
from miniharness import database, faults
from miniharness.engine import Answer, Json, Ports, drive
from miniharness.errors import ContractMismatch, ToolUnavailable, UsageError
from miniharness.machine import Outcome
from miniharness.mcp.declared import DeclaredTool
from miniharness.mcp.wire import EPOCH_META, TOKEN
from store import Runs, Tickets

SECRET = "token-9f3c2b7a"
LOOK_UP, CREATE = "lookup_review_ticket", "create_review_ticket"
OTHER = GOAL | {"title": "another title"}


class Remote:
    """A client of a server object, and a look at the store behind it."""

    def __init__(self, client: Client, path: Path) -> None:
        self.client = client
        self._path = path

    async def call(self, name: str, meta: dict[str, Any] | None = None, **arguments: Any) -> CallToolResult:
        return await self.client.call_tool(name, arguments, meta=meta)

    async def look_up(self, key: str, **meta: Any) -> CallToolResult:
        return await self.call(LOOK_UP, carrying(**meta), operation_key=key)

    async def create(self, key: str, action: dict[str, Any] = GOAL, **meta: Any) -> CallToolResult:
        return await self.call(CREATE, carrying(**meta), operation_key=key, **action)

    def rows(self) -> tuple[list[tuple[str, dict[str, str]]], list[tuple[str, int]]]:
        """All tickets, and all fences."""
        connection = sqlite3.connect(self._path)
        fences = connection.execute("select * from operation_fences order by 1").fetchall()
        connection.close()
        return tickets(self._path.parent), fences


Door = AbstractAsyncContextManager[Remote]


def carrying(**meta: Any) -> dict[str, Any] | None:
    return {EPOCH_META: meta["epoch"]} if "epoch" in meta else None


def refusal(result: CallToolResult) -> tuple[str, str]:
    """The code and the message of a refused call."""
    assert result.is_error
    error = result.structured_content["error"]
    return error["code"], error["message"]


def ticket(result: CallToolResult) -> Any:
    """The ticket in a good answer, which says the same as text."""
    assert not result.is_error
    assert json.loads(result.content[0].text) == result.structured_content
    assert list(result.structured_content) == ["ticket"]
    return result.structured_content["ticket"]


@asynccontextmanager
async def serving(path: Path, mode: str = "auto") -> AsyncIterator[Remote]:
    store = Tickets(path)
    try:
        async with Client(ticket_server.build(store), mode=mode) as client:
            yield Remote(client, path)
    finally:
        store.close()


@pytest.fixture(params=["auto", "legacy"])
def door(request: pytest.FixtureRequest, tmp_path: Path) -> Door:
    """The server's tools, in both protocol eras."""
    return serving(tmp_path / "tickets.sqlite", request.param)


# -- the tools --------------------------------------------------------------------------------------------------------


async def test_an_error_keeps_to_the_schema_of_the_answer(door: Door) -> None:
    """Some clients check the structured content of errors, too; they must see the error, not a breach of the schema."""
    async with door as remote:
        schemas = {tool.name: tool.output_schema for tool in (await remote.client.list_tools()).tools}
        await remote.create("k")
        await remote.look_up("other", epoch=5)
        conflict, stale = await remote.create("k", OTHER), await remote.create("other", epoch=4)
        invalid = await remote.look_up("")
        for name, result in ((CREATE, conflict), (CREATE, stale), (LOOK_UP, invalid)):
            assert result.is_error
            Draft202012Validator(schemas[name]).validate(result.structured_content)


async def test_the_tools_say_what_they_take_give_and_do(door: Door) -> None:
    """Both tools list required arguments, a typed output and honest annotations; the epoch is no argument."""
    async with door as remote:
        listed = {tool.name: tool for tool in (await remote.client.list_tools()).tools}
        assert set(listed) == {LOOK_UP, CREATE}
        assert set(listed[LOOK_UP].input_schema["required"]) == {"operation_key"}
        assert set(listed[CREATE].input_schema["required"]) == {"operation_key", "source", "title"}
        for tool in listed.values():
            assert set(tool.input_schema["properties"]) == set(tool.input_schema["required"])
            assert tool.output_schema["required"] == ["ticket"]
            action = tool.output_schema["$defs"]["Action"]
            assert (set(action["required"]), action["additionalProperties"]) == ({"source", "title"}, False)
        reads, writes = listed[LOOK_UP].annotations, listed[CREATE].annotations
        assert (reads.read_only_hint, reads.open_world_hint) == (True, False)
        assert (writes.read_only_hint, writes.destructive_hint, writes.idempotent_hint) == (False, False, True)


async def test_a_ticket_is_created_once_and_found_by_its_key(door: Door) -> None:
    """The same key and content again returns the ticket that is there; another key finds nothing."""
    async with door as remote:
        assert ticket(await remote.look_up("a")) is None
        first = ticket(await remote.create("a"))
        assert first["action"] == GOAL
        assert ticket(await remote.create("a")) == ticket(await remote.look_up("a")) == first
        assert ticket(await remote.look_up("b")) is None
        assert remote.rows() == ([("a", GOAL)], [])


async def test_a_key_that_holds_another_action_is_a_conflict_that_says_what_differs(door: Door) -> None:
    """The difference is named field by field, and the other ticket is untouched."""
    async with door as remote:
        await remote.create("a")
        code, message = refusal(await remote.create("a", OTHER))
        assert code == "conflict"
        assert 'title is "核验 Agent Harness 资料", wanted "another title"' in message
        assert "source" not in message
        assert remote.rows() == ([("a", GOAL)], [])


async def test_a_look_up_with_an_epoch_raises_the_fence_and_older_writes_are_refused(door: Door) -> None:
    """The fence only grows, stands for its key alone, and lets its own and newer epochs write."""
    async with door as remote:
        await remote.look_up("a", epoch=5)
        await remote.look_up("a", epoch=3)
        fenced = ([], [("a", 5)])
        assert remote.rows() == fenced
        for late in ({"epoch": 4}, {"epoch": 0}, {}):
            code, message = refusal(await remote.create("a", **late))
            assert code == "stale"
            assert "fenced at epoch 5" in message
            assert remote.rows() == fenced
        assert ticket(await remote.create("a", epoch=5))["action"] == GOAL
        assert ticket(await remote.create("a", epoch=6))["action"] == GOAL
        assert ticket(await remote.create("b"))["action"] == GOAL
        assert remote.rows() == ([("a", GOAL), ("b", GOAL)], [("a", 5)])


async def test_a_write_without_an_epoch_is_accepted_only_while_no_fence_stands(door: Door) -> None:
    """A look-up without an epoch raises no fence; one with an epoch shuts plain writes out, repeated ones included."""
    async with door as remote:
        await remote.look_up("a")
        first = ticket(await remote.create("a"))
        await remote.look_up("a", epoch=1)
        assert refusal(await remote.create("a"))[0] == "stale"
        assert ticket(await remote.look_up("a")) == first
        assert remote.rows() == ([("a", GOAL)], [("a", 1)])


@pytest.mark.parametrize("epoch", ["5", "", -1, True, False, 1.0, 1.5, 1 << 63, [1], {}], ids=repr)
async def test_an_epoch_that_is_no_whole_number_is_refused(door: Door, epoch: Any) -> None:
    """Neither tool guesses: the call is `invalid`, no fence is raised and nothing is written."""
    async with door as remote:
        for call in (remote.look_up, remote.create):
            code, message = refusal(await call("a", epoch=epoch))
            assert code == "invalid"
            assert EPOCH_META in message
        assert remote.rows() == ([], [])


@pytest.mark.parametrize("epoch", [0, 1, (1 << 63) - 1])
async def test_every_whole_number_that_fits_is_an_epoch(door: Door, epoch: int) -> None:
    """From 0 to the largest integer of the store, and null, which is none."""
    async with door as remote:
        await remote.look_up("a", epoch=epoch)
        assert remote.rows() == ([], [("a", epoch)])
        assert ticket(await remote.create("a", epoch=epoch))["action"] == GOAL
        assert ticket(await remote.create("b", epoch=None))["action"] == GOAL


@pytest.mark.parametrize("text", ["", " ", "\u200b", "a\0", "a\nb", "x" * 301, "\ud83d"], ids=ascii)
async def test_text_is_checked_by_the_same_rule_in_every_argument(door: Door, text: str) -> None:
    """A bad key, source or title is `invalid` with the field's name, in either tool, and changes nothing."""
    async with door as remote:
        calls = {
            "operation_key": (partial(remote.look_up, text, epoch=1), partial(remote.create, text, epoch=1)),
            "source": (partial(remote.create, "a", GOAL | {"source": text}),),
            "title": (partial(remote.create, "a", GOAL | {"title": text}),),
        }
        for field, attempts in calls.items():
            for attempt in attempts:
                code, message = refusal(await attempt())
                assert (code, message.split()[0]) == ("invalid", field)
        assert remote.rows() == ([], [])


@pytest.mark.parametrize(
    "action", [{}, {"source": "a"}, GOAL | {"title": 7}, GOAL | {"title": None}, GOAL | {"title": [1]}]
)
async def test_arguments_of_another_shape_are_an_error_and_change_nothing(door: Door, action: Any) -> None:
    """A missing or mistyped argument never reaches the store."""
    async with door as remote:
        assert (await remote.create("a", action)).is_error
        assert remote.rows() == ([], [])


async def test_a_locked_store_is_an_error_of_its_own_kind(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody knows whether it was written, the code is `store`, which is not on the list of clean refusals."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    async with door as remote:
        other = sqlite3.connect(tmp_path / "tickets.sqlite", isolation_level=None)
        other.execute("begin immediate")
        code, message = refusal(await remote.create("a", epoch=1))
        assert (code, "locked" in message) == ("store", True)
        assert not ticket_lab.tools().clean({"code": code})
        other.execute("rollback")
        other.close()
        assert remote.rows() == ([], [])


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--transport", "http"], TOKEN),
        (["--transport", "http", "--host", "0.0.0.0"], "0.0.0.0, which others can reach"),
        (["--transport", "http", "--port", "99999"], "port"),
        (["--transport", "carrier-pigeon"], "carrier-pigeon"),
        (["--port", "many"], "many"),
        (["--verbose"], "--verbose"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_is_told_so_before_any_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    """Exit code 2 and what is wrong with it; HTTP without a token never starts, on no address."""
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: pytest.fail("it serves"))
    monkeypatch.delenv(TOKEN, raising=False)
    if "--port" in args:
        monkeypatch.setenv(TOKEN, SECRET)
    with pytest.raises(SystemExit) as ended:
        ticket_server.main(["--db", str(tmp_path / "tickets.sqlite"), *args])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_store_ends_the_command_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 75, the reason on standard error, and the file as it was."""
    (tmp_path / "tickets.sqlite").write_text("dear diary\n" * 100)
    assert ticket_server.main(["--db", str(tmp_path / "tickets.sqlite")]) == 75
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "is not a SQLite database" in err
    assert (tmp_path / "tickets.sqlite").read_text() == "dear diary\n" * 100


# -- over HTTP --------------------------------------------------------------------------------------------------------


class Http:
    """`server.py --transport http` as a real process."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.process: subprocess.Popen[str] | None = None

    def start(self, **env: str) -> Http:
        self.state_dir.mkdir(exist_ok=True)
        command = [sys.executable, "server.py", "--db", str(self.state_dir / "tickets.sqlite")]
        command += ["--transport", "http", "--port", str(self.port)]
        env = {name: value for name, value in os.environ.items() if name != TOKEN} | {TOKEN: SECRET} | env
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)
        for _ in range(2000):
            assert self.process.poll() is None, self.process.communicate()
            with socket.socket() as probe:
                probe.settimeout(0.01)
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            try:
                self.process.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError("the server did not start to listen")

    def stop(self, number: signal.Signals = signal.SIGKILL) -> tuple[int, str, str]:
        """End it; returns its exit code and all that it printed."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err

    def post(self, token: str | None = SECRET, **headers: str) -> tuple[int, bytes]:
        """List the tools in one plain request; returns the status and the body."""
        meta = {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "0"},
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": meta}})
        fixed = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": "2026-07-28",
            "MCP-Method": "tools/list",
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            sent = fixed | ({"Authorization": f"Bearer {token}"} if token is not None else {}) | headers
            connection.request("POST", "/mcp", body, sent)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Http]:
    """An HTTP server that is not started yet, on the state folder of a lab that knows its token."""
    monkeypatch.setenv(TOKEN, SECRET)
    server = Http(tmp_path / "state")
    yield server
    if server.process and server.process.poll() is None:
        server.stop()


@pytest.mark.process
def test_only_the_token_and_the_right_host_open_the_door(web: Http) -> None:
    """No token and a wrong one are 401 without a word; another Host or Origin is refused even with the token."""
    web.start()
    for token in (None, "", "wrong", SECRET[:-1], SECRET + "x", SECRET.upper()):
        assert web.post(token) == (401, b"")
    assert web.post(None, Authorization=f"Basic {SECRET}") == (401, b"")
    for host in (
        "evil.example",
        f"evil.example:{web.port}",
        f"127.0.0.1:{web.port + 1}",
        f"127.0.0.1.evil.example:{web.port}",
    ):
        status, body = web.post(Host=host)
        assert status in (403, 421)
        assert CREATE.encode() not in body
    status, body = web.post(Origin="http://evil.example")
    assert status == 403
    assert CREATE.encode() not in body
    status, body = web.post()
    assert status == 200
    assert CREATE.encode() in body
    assert tickets(web.state_dir) == []


@pytest.mark.process
def test_the_token_is_in_no_command_line_and_in_no_output(web: Http) -> None:
    """Good, bad and broken requests later, the token stands only in the environment; a signal ends the server."""
    web.start()
    web.post()
    web.post("wrong")
    web.post(Host="evil.example")
    web.post(**{"Content-Type": "text/plain"})
    cmdline = Path(f"/proc/{web.process.pid}/cmdline").read_bytes()
    assert b"server.py" in cmdline
    assert SECRET.encode() not in cmdline
    _, out, err = web.stop(signal.SIGTERM)
    assert f"listening on {web.url}" in err
    assert SECRET not in out + err
    assert "Traceback" not in err
    assert SECRET.encode() not in (web.state_dir / "tickets.sqlite").read_bytes()


@pytest.mark.process
async def test_a_run_stays_with_the_server_it_was_opened_for(web: Http) -> None:
    """Where the effect goes is part of the contract: another server is refused, and left out it is the stored one."""
    web.start()
    planned = await ticket_lab.execute(web.state_dir, url=web.url)
    assert (planned["state"], planned["interrupted"]) == ("waiting_execution", None)
    for other in (ticket_lab.OWN_SERVER, "http://127.0.0.1:1/mcp"):
        with pytest.raises(ContractMismatch, match=r"tool\.server"):
            await ticket_lab.execute(web.state_dir, url=other, execute_write=True)
    assert tickets(web.state_dir) == []
    done = await ticket_lab.execute(web.state_dir, execute_write=True)
    assert (done["state"], done["interrupted"], done["attempts"]) == ("succeeded", None, 1)
    assert done["ticket"]["action"] == GOAL
    assert tickets(web.state_dir) == [("review-001:ticket", GOAL)]
    assert SECRET not in json.dumps(done)


@pytest.mark.parametrize("url", ["localhost:8765", "ftp://x/mcp", "http://", "http://user:word@x/mcp"])
async def test_a_url_that_cannot_be_used_opens_nothing(tmp_path: Path, url: str) -> None:
    """The rule is told before a run is made or a request debited."""
    with pytest.raises(UsageError, match="--url"):
        await ticket_lab.execute(tmp_path, url=url)
    with closing(Runs(tmp_path)) as runs:
        assert runs.get(ticket_lab.RUN) is None


@pytest.mark.process
async def test_a_wrong_token_stops_the_run_before_it_learned_anything(
    web: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stays planned and is told that the tool could not be asked; with the right token it goes on."""
    web.start()
    monkeypatch.setenv(TOKEN, "wrong")
    result = await ticket_lab.execute(web.state_dir, url=web.url, execute_write=True)
    assert (result["state"], result["attempts"]) == ("planned", 0)
    assert result["interrupted"]["error"] == "ToolUnavailable"
    assert TOKEN in result["interrupted"]["message"]
    assert tickets(web.state_dir) == []
    monkeypatch.setenv(TOKEN, SECRET)
    assert (await ticket_lab.execute(web.state_dir, url=web.url, execute_write=True))["state"] == "succeeded"


@pytest.mark.process
async def test_a_server_that_is_killed_after_its_commit_leaves_an_unknown_outcome_that_a_look_up_settles(
    web: Http,
) -> None:
    """The run stops interrupted and keeps its state; with the server back, one ticket and one attempt."""
    web.start(**{faults.ENVIRONMENT: faults.SERVER_AFTER_COMMIT})
    result = await ticket_lab.execute(web.state_dir, url=web.url, execute_write=True)
    assert web.process.wait(20) == faults.EXIT_CODE
    assert (result["state"], result["attempts"]) == ("reconciling", 1)
    assert result["interrupted"]["error"] == "ToolUnavailable"
    assert result["events"][-1]["type"] == "dispatch_answered"
    assert result["events"][-1]["detail"]["outcome"] == "unknown"
    assert tickets(web.state_dir) == [("review-001:ticket", GOAL)]
    web.process.communicate()

    web.start()
    done = await ticket_lab.execute(web.state_dir, url=web.url, execute_write=True)
    assert (done["state"], done["attempts"]) == ("succeeded", 1)
    assert tickets(web.state_dir) == [("review-001:ticket", GOAL)]


class After:
    """The ticket tool around which something happens just before it is dispatched."""

    def __init__(self, tool: DeclaredTool, happens: Callable[[], Any]) -> None:
        self._tool = tool
        self._happens = happens
        self.connect = tool.connect
        self.look_up = tool.look_up

    async def dispatch(self, key: str, action: Json, epoch: int) -> Answer:
        self._happens()
        return await self._tool.dispatch(key, action, epoch)


@pytest.mark.process
async def test_a_connection_refused_at_the_dispatch_is_known_to_be_unsent(web: Http) -> None:
    """The attempt is spent but not in doubt; with the server back, the run goes on with a second one."""
    web.start()
    runs = Runs(web.state_dir)
    asked = ticket_lab.contract_for(None, url=web.url)
    run = await runs.open(ticket_lab.RUN, asked)
    propose = partial(model.ask, provider=asked.provider, model=asked.model)
    kills = itertools.count()
    async with ticket_lab.session_for(web.state_dir, web.url) as session:
        tool = After(DeclaredTool(session, ticket_lab.tools()), lambda: (next(kills), web.stop()))
        with pytest.raises(ToolUnavailable):
            await drive(runs, run, Ports(propose, tool), True)
    stored = runs.require(ticket_lab.RUN)
    runs.close()
    assert next(kills) == 1
    assert web.process.returncode == -signal.SIGKILL
    assert (stored.state, stored.last, stored.dispatches_spent, stored.doubtful) == (
        "reconciling",
        Outcome.UNSENT,
        1,
        0,
    )
    assert tickets(web.state_dir) == []

    web.start()
    done = await ticket_lab.execute(web.state_dir, url=web.url, execute_write=True)
    assert (done["state"], done["attempts"]) == ("succeeded", 2)
    assert tickets(web.state_dir) == [("review-001:ticket", GOAL)]


@pytest.mark.process
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_real_process_without_a_token_never_listens(tmp_path: Path, host: str) -> None:
    """Exit code 2, the variable named, no file made."""
    command = [sys.executable, "server.py", "--db", str(tmp_path / "t.sqlite"), "--transport", "http", "--host", host]
    env = {name: value for name, value in os.environ.items() if name != TOKEN}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert TOKEN in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_a_port_that_is_taken_ends_the_command_without_a_traceback(web: Http) -> None:
    """A second server on the same port says so and ends as one to try again; the first one serves on."""
    web.start()
    command = [sys.executable, "server.py", "--db", str(web.state_dir / "tickets.sqlite")]
    command += ["--transport", "http", "--port", str(web.port)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "address already in use" in ended.stderr.lower()
    assert "Traceback" not in ended.stderr
    assert "listening" not in ended.stderr
    assert web.post()[0] == 200


# -- standard input and output ----------------------------------------------------------------------------------------

OBSERVED = """\
import sys, server
from miniharness import database

settle = database.Database._settle
def observed(self, ready):
    print("commit of", len(ready))
    settle(self, ready)
database.Database._settle = observed
sys.exit(server.main(["--db", sys.argv[1]]))
"""


def message(method: str, number: int | None = None, **params: Any) -> bytes:
    plain = {"jsonrpc": "2.0", "method": method, "params": params} | ({} if number is None else {"id": number})
    return json.dumps(plain).encode() + b"\n"


@pytest.mark.process
def test_calls_that_arrive_together_share_a_commit_and_only_answers_are_on_the_output(tmp_path: Path) -> None:
    """What handlers print goes to standard error; a line that is no message is passed over; no input, no server."""
    calls = [message("tools/call", n, name=CREATE, arguments=GOAL | {"operation_key": f"k-{n}"}) for n in range(1, 9)]
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    argv = [sys.executable, "-c", OBSERVED, str(tmp_path / "tickets.sqlite")]
    with subprocess.Popen(argv, cwd=ROOT, stdin=-1, stdout=-1, stderr=-1) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(b"no message\n" + message("initialize", 0, **hello) + message("notifications/initialized"))
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == 0
        process.stdin.write(b"".join(calls))
        process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for _ in calls]
        process.stdin.close()
        rest, told = process.stdout.read(), process.stderr.read().decode()
    assert {answer["id"] for answer in answers} == set(range(1, 9))
    assert not any(answer["result"]["isError"] for answer in answers)
    assert (rest, process.returncode) == (b"", 0)
    assert told.count("commit of") < 4, told
    assert len(tickets(tmp_path)) == 8


@pytest.mark.process
def test_a_server_without_pipes_serves_all_the_same(tmp_path: Path) -> None:
    """A file as input cannot be watched by an event loop."""
    asked = tmp_path / "asked"
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    asked.write_bytes(message("initialize", 0, **hello))
    argv = [sys.executable, "server.py", "--db", str(tmp_path / "tickets.sqlite")]
    with asked.open("rb") as source:
        done = subprocess.run(argv, cwd=ROOT, stdin=source, capture_output=True, timeout=20)
    assert (json.loads(done.stdout)["id"], done.returncode) == (0, 0)
