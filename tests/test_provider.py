"""The live provider over real HTTP, against a stand-in of the Messages API: one request each, and whose turn it is."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anthropic as _warm  # noqa: F401  (what is timed here is not the import of the SDK)
import pytest
from conftest import GOAL, tickets

import lab as ticket_lab
from miniharness import engine
from miniharness.errors import UsageError
from miniharness.mcp.wire import TOKEN
from miniharness.models import anthropic
from model import MAX_TOKENS, PROPOSE_TOOL
from store import Runs

KEY = "sk-test-7c1f0a55e0d94f0c"
MODEL = "claude-of-the-stand-in"

Play = Callable[["Exchange"], None]


class Exchange(BaseHTTPRequestHandler):
    """One request to the stand-in; it is kept, and answered as prepared."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append({"path": self.path, "headers": headers, "body": body})
        self.close_connection = True
        with suppress(OSError):
            self.server.answers.pop(0)(self)

    def send(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        self.head(status, len(body), kind, **headers)
        self.wfile.write(body)

    def head(self, status: int, size: int, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        fixed = {"content-type": kind, "content-length": str(size), "request-id": "req_17", "connection": "close"}
        for name, value in (fixed | {name.replace("_", "-"): value for name, value in headers.items()}).items():
            self.send_header(name, value)
        self.end_headers()


class Server(ThreadingHTTPServer):
    """A stand-in of `POST /v1/messages` that plays `answers` in turn and keeps every request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.requests: list[dict[str, Any]] = []
        self.answers: list[Play] = []
        self.closing = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


def message(content: Any = None, stop: Any = "tool_use", **change: Any) -> dict[str, Any]:
    """A response of the Messages API; without `content`, the forced call with the goal."""
    call = {"type": "tool_use", "id": "toolu_1", "name": PROPOSE_TOOL["name"], "input": GOAL}
    whole = {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "stop_sequence": None}
    usage = {"input_tokens": 210, "output_tokens": 35}
    return whole | {"content": [call] if content is None else content, "stop_reason": stop, "usage": usage} | change


def replies(body: Any, status: int = 200, kind: str = "application/json", **headers: str) -> Play:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda exchange: exchange.send(status, raw, kind, **headers)


def fails(status: int, **headers: str) -> Play:
    """An error whose body quotes the key, as a careless provider might."""
    said = {"type": "error", "error": {"type": "some_error", "message": f"wrong: {KEY}"}, "request_id": "req_17"}
    return replies(said, status, **headers)


def drops(exchange: Exchange) -> None:
    exchange.connection.shutdown(socket.SHUT_RDWR)


def stalls(exchange: Exchange) -> None:
    exchange.server.closing.wait(30)


def stalls_in_the_body(exchange: Exchange) -> None:
    exchange.head(200, 1000)
    exchange.wfile.write(b'{"id": ')
    stalls(exchange)


def trickles(exchange: Exchange) -> None:
    exchange.head(200, 1_000_000)
    while not exchange.server.closing.wait(0.02):
        exchange.wfile.write(b" ")


def breaks_off_in_the_arguments(exchange: Exchange) -> None:
    raw = json.dumps(message()).encode()
    exchange.head(200, len(raw))
    exchange.wfile.write(raw[: raw.index(b"title") + 12])


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A running stand-in, which the SDK finds through its environment."""
    server = Server()
    monkeypatch.setenv("ANTHROPIC_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a ticket server that is not there: a run can be planned, and no further."""
    monkeypatch.setenv(TOKEN, "t")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/mcp"


def quotes_the_key(state_dir: Path, *told: Any) -> bool:
    """Whether the key stands in any file of the folder or in anything that was told."""
    files = b"".join(path.read_bytes() for path in state_dir.rglob("*") if path.is_file())
    return KEY.encode() in files or any(KEY in f"{one!s} {one!r}" for one in told)


def types(result: Mapping[str, Any]) -> list[str]:
    return [event["type"] for event in result["events"]]


PASSING = {
    "401": (fails(401), "check ANTHROPIC_API_KEY"),
    "402": (fails(402), "check its billing"),
    "403": (fails(403), "check its permissions"),
    "408": (fails(408), "then try again"),
    "409": (fails(409), "then try again"),
    "429 with retry-after": (fails(429, retry_after="7"), "slow down; try again after 7 s"),
    "429 with a date": (fails(429, retry_after="Mon, 30 Nov 2026 04:00:00 GMT"), "slow down; then try again"),
    "500": (fails(500), "the provider failed; then try again"),
    "500 that asks to be retried": (fails(500, x_should_retry="true"), "the provider failed; then try again"),
    "503 as HTML": (replies(b"<html>", 503, "text/html"), "the provider failed; then try again"),
    "529": (fails(529), "overloaded; then try again"),
    "a dropped connection": (drops, "was not reached"),
    "a body cut after half of the arguments": (breaks_off_in_the_arguments, "try later"),
    "200 that is HTML": (replies(b"<html>Log in</html>", kind="text/html"), "try later"),
    "200 that is HTML and says JSON": (replies(b"<html>Log in</html>"), "try later"),
    "200 with an empty body": (replies(b""), "try later"),
    "200 with invalid UTF-8": (replies(b'{"id": "\xff\xfe"}'), "try later"),
    "200 with a list": (replies([1, 2]), "try later"),
    "200 with null": (replies(None), "try later"),
    "200 with a text": (replies("fine"), "try later"),
    "200 nested without end": (replies(b'{"a":' * 200_000), "try later"),
}
FINAL = {
    "400": (fails(400), "refused the request itself"),
    "404": (fails(404), "does not know this model; start another run with another --model"),
    "413": (fails(413), "refused the request itself"),
    "422": (fails(422), "refused the request itself"),
}


@pytest.mark.parametrize(("play", "turn"), PASSING.values(), ids=PASSING)
async def test_a_failure_that_can_pass_keeps_the_run_new_and_a_later_answer_plans_it(
    tmp_path: Path, api: Server, nowhere: str, play: Play, turn: str
) -> None:
    """One request on the wire, one debit, a message that says whose turn it is; the next command goes on from there."""
    ask = {"provider": "anthropic", "model": MODEL, "url": nowhere}
    api.answers = [play, replies(message())]
    result = await ticket_lab.execute(tmp_path, **ask)
    assert len(api.requests) == 1
    assert result["state"] == "new"
    assert result["interrupted"]["error"] == "ModelUnavailable"
    assert turn in result["interrupted"]["message"]
    assert len(result["interrupted"]["message"]) < 300
    assert result["budget"]["model_requests"]["spent"] == 1
    assert types(result) == ["opened", "model_requested", "model_failed"]
    assert result["next"]["action"] == "resume"

    again = await ticket_lab.execute(tmp_path, **ask)
    assert len(api.requests) == 2
    assert again["state"] == "planned"
    assert again["proposal"] == GOAL
    assert again["budget"]["model_requests"]["spent"] == 2
    assert again["interrupted"]["error"] == "ToolUnavailable"
    assert not quotes_the_key(tmp_path, result, again)


@pytest.mark.parametrize(("play", "turn"), FINAL.values(), ids=FINAL)
async def test_a_refused_request_ends_the_run_because_asking_again_cannot_help(
    tmp_path: Path, api: Server, nowhere: str, play: Play, turn: str
) -> None:
    """One request, one debit, `failed` with the reason and the request id; a later command asks nobody."""
    ask = {"provider": "anthropic", "model": MODEL, "url": nowhere}
    api.answers = [play]
    result = await ticket_lab.execute(tmp_path, **ask)
    assert (result["state"], result["interrupted"]) == ("failed", None)
    assert turn in result["reason"]
    assert "req_17" in result["reason"]
    assert result["budget"]["model_requests"]["spent"] == 1
    assert types(result) == ["opened", "model_requested", "proposal_rejected"]
    assert await ticket_lab.execute(tmp_path, **ask) == result
    assert len(api.requests) == 1
    assert not quotes_the_key(tmp_path, result)


@pytest.mark.parametrize("play", [stalls, stalls_in_the_body], ids=["before the head", "in the body"])
async def test_a_provider_that_stalls_is_left_after_the_time_limit(
    tmp_path: Path, api: Server, nowhere: str, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    """Silence ends with the limit named, after one request, and the run can ask again."""
    monkeypatch.setattr(anthropic, "TIMEOUT_S", 0.3)
    api.answers = [play]
    result = await ticket_lab.execute(tmp_path, provider="anthropic", model=MODEL, url=nowhere)
    assert result["state"] == "new"
    assert result["interrupted"] == {
        "error": "ModelUnavailable",
        "message": "the provider did not answer within 0.3 s; try later",
    }
    assert result["budget"]["model_requests"]["spent"] == len(api.requests) == 1


async def test_a_provider_that_trickles_is_left_after_the_time_limit_for_the_whole_answer(
    tmp_path: Path, api: Server, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then resets every read limit but not the one for the request in all."""
    monkeypatch.setattr(engine, "MODEL_TIMEOUT_S", 0.5)
    api.answers = [trickles]
    result = await ticket_lab.execute(tmp_path, provider="anthropic", model=MODEL, url=nowhere)
    assert (result["state"], result["interrupted"]["error"]) == ("new", "ModelUnavailable")
    assert "try later" in result["interrupted"]["message"]
    assert result["budget"]["model_requests"]["spent"] == len(api.requests) == 1


async def test_nobody_at_the_providers_address_keeps_the_run_new(
    tmp_path: Path, api: Server, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused connection is a failure that can pass."""
    monkeypatch.setenv("ANTHROPIC_BASE_URL", nowhere.removesuffix("/mcp"))
    result = await ticket_lab.execute(tmp_path, provider="anthropic", model=MODEL, url=nowhere)
    assert (result["state"], result["interrupted"]["error"]) == ("new", "ModelUnavailable")
    assert "try later" in result["interrupted"]["message"]
    assert result["budget"]["model_requests"]["spent"] == 1
    assert api.requests == []


async def test_the_request_forces_the_one_strict_tool_and_carries_nothing_else(
    tmp_path: Path, api: Server, nowhere: str
) -> None:
    """The wire shows the model, the goal as data, one forced strict tool, a bounded answer and a first attempt."""
    api.answers = [replies(message())]
    await ticket_lab.execute(tmp_path, run="secret-run-name", provider="anthropic", model=MODEL, url=nowhere)
    (sent,) = api.requests
    body = sent["body"]
    assert sent["path"] == "/v1/messages"
    assert sent["headers"]["x-stainless-retry-count"] == "0"
    assert any(KEY in value for value in sent["headers"].values())
    assert (body["model"], body["max_tokens"]) == (MODEL, MAX_TOKENS)
    assert body["tools"] == [PROPOSE_TOOL]
    assert PROPOSE_TOOL["strict"] is True
    assert PROPOSE_TOOL["input_schema"]["additionalProperties"] is False
    assert body["tool_choice"] == {"type": "tool", "name": PROPOSE_TOOL["name"], "disable_parallel_tool_use": True}
    assert all(f"{field}: {value}" in body["messages"][0]["content"] for field, value in GOAL.items())
    assert not any(word in json.dumps(body) for word in ("secret-run-name", "operation", "epoch", KEY))


async def test_a_good_answer_is_kept_with_who_gave_it_and_what_it_cost(
    tmp_path: Path, api: Server, nowhere: str
) -> None:
    """The proposal and its metadata are stored; neither the key nor the prompt is."""
    api.answers = [replies(message())]
    result = await ticket_lab.execute(tmp_path, provider="anthropic", model=MODEL, url=nowhere)
    assert result["proposal"] == GOAL
    assert result["metadata"] == {
        "response_id": "msg_1",
        "model": MODEL,
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 210, "output_tokens": 35},
    }
    assert not quotes_the_key(tmp_path, result)
    assert "Propose exactly" not in json.dumps(result)


async def test_without_a_key_nothing_is_debited_and_nobody_is_asked(
    tmp_path: Path, api: Server, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing key is a wrong command: it costs nothing, and the same command with a key goes on."""
    ask = {"provider": "anthropic", "model": MODEL, "url": nowhere}
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    with pytest.raises(UsageError, match="ANTHROPIC_API_KEY"):
        await ticket_lab.execute(tmp_path, **ask)
    runs = Runs(tmp_path)
    stored = runs.get(ticket_lab.RUN)
    runs.close()
    assert stored is None or (stored.state, stored.model_requests_spent) == ("new", 0)
    assert api.requests == []

    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    api.answers = [replies(message())]
    assert (await ticket_lab.execute(tmp_path, **ask))["state"] == "planned"


async def test_a_planned_run_needs_no_key_any_more(
    tmp_path: Path, api: Server, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is asked once; with the key revoked, the run goes on from its proposal."""
    ask = {"provider": "anthropic", "model": MODEL, "url": nowhere}
    api.answers = [replies(message())]
    await ticket_lab.execute(tmp_path, **ask)
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    result = await ticket_lab.execute(tmp_path, **ask)
    assert (result["state"], result["interrupted"]["error"]) == ("planned", "ToolUnavailable")
    assert len(api.requests) == 1


async def test_the_model_budget_ends_the_run_and_is_named(tmp_path: Path, api: Server, nowhere: str) -> None:
    """Five failed requests are five debits; the sixth command sends nothing and the run is `failed`."""
    ask = {"provider": "anthropic", "model": MODEL, "url": nowhere}
    api.answers = [fails(529) for _ in range(6)]
    for spent in range(1, 6):
        result = await ticket_lab.execute(tmp_path, **ask)
        assert (result["state"], result["budget"]["model_requests"]["spent"]) == ("new", spent)
    result = await ticket_lab.execute(tmp_path, **ask)
    assert (result["state"], result["interrupted"]) == ("failed", None)
    assert "model request budget is spent (5 of 5)" in result["reason"]
    assert len(api.requests) == 5


@pytest.mark.process
async def test_a_live_proposal_goes_all_the_way_to_one_ticket(tmp_path: Path, api: Server) -> None:
    """From the provider's answer through the real ticket server to `succeeded`, with one request and one attempt."""
    api.answers = [fails(529), replies(message())]
    for state in ("new", "succeeded"):
        result = await ticket_lab.execute(tmp_path, provider="anthropic", model=MODEL, execute_write=True)
        assert result["state"] == state
    assert result["attempts"] == 1
    assert tickets(tmp_path) == [("review-001:ticket", GOAL)]
    assert len(api.requests) == 2
    assert not quotes_the_key(tmp_path, result)
