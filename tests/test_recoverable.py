"""Tools of server authors: outcomes and fences beside the effect, in SQLite and in Postgres, through MCP and through
`miniharness call` with servers that are killed around their commit."""

from __future__ import annotations

import json
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
from conftest import GOAL, Lab
from forked import NURSERY, ROOT
from mcp import Client, MCPError
from mcp.server import MCPServer
from mcp.types import Request, Result
from postgres import postgres
from pydantic import Field

import server as ticket_server
from miniharness.mcp.wire import EPOCH_META, KEY_META, OUTCOME_METHOD, RECOVERABLE, REPLAYED_META
from miniharness.server.extension import Recoverable
from miniharness.server.outcomes import Conflict, Operation, Outcomes, Refused, Stale
from store import Tickets

Connect = Callable[[], Any]
NOTES = "create table notes (title text not null, epoch bigint)"
DOCS = (ROOT / "docs" / "recoverable-tools.md").read_text()


# -- outcomes in a database -------------------------------------------------------------------------------------------


def lite(path: str) -> Any:
    connection = sqlite3.connect(path, check_same_thread=False, timeout=30)
    connection.execute("pragma synchronous = off")  # the power stays on here
    return connection


def full(url: str) -> Any:
    """A connection as an author may have it; the operations have their own isolation level."""
    import psycopg

    connection = psycopg.connect(url)
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    return connection


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with postgres() as address:
        yield address


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.process)])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """Opens a database with an empty table of notes, of either kind."""
    if request.param == "sqlite":
        opened: Connect = partial(lite, str(tmp_path / "notes.sqlite"))
    else:
        opened = partial(full, request.getfixturevalue("url"))
    with closing(opened()) as connection:
        for table in ("notes", "operation_fences", "operation_outcomes"):
            connection.execute(f"drop table if exists {table}")
        connection.execute(NOTES)
        connection.commit()
    return opened


@pytest.fixture
def outcomes(connect: Connect) -> Iterator[Outcomes]:
    with closing(Outcomes(connect)) as made:
        yield made


def rows(connect: Connect, table: str = "notes") -> list[tuple[Any, ...]]:
    with closing(connect()) as connection:
        return [tuple(row) for row in connection.execute(f"select * from {table} order by 1").fetchall()]


def insert(database: Any, title: str, epoch: int | None = None) -> dict[str, Any]:
    mark = "?" if isinstance(database, sqlite3.Connection) else "%s"
    database.execute(f"insert into notes values ({mark}, {mark})", (title, epoch))
    return {"title": title}


def add(outcomes: Outcomes, key: str, title: str = "hello", epoch: int | None = None, tool: str = "add") -> Any:
    return outcomes.once(Operation(key, tool, {"title": title}, epoch), lambda database: insert(database, title, epoch))


def test_a_key_is_done_once_and_replayed(connect: Connect, outcomes: Outcomes) -> None:
    """The first result again, and the look-up tells tool, arguments and result; another key is another operation."""
    first, again = add(outcomes, "a"), add(outcomes, "a")
    assert (first.replayed, again.replayed, first.result, again.result) == (
        False,
        True,
        {"title": "hello"},
        first.result,
    )
    assert outcomes.look_up("a") == first
    assert outcomes.look_up("b") is None
    assert add(outcomes, "b").replayed is False
    assert rows(connect) == [("hello", None)] * 2


def test_a_key_that_holds_something_else_is_a_conflict_that_names_what_and_tells_no_value(
    connect: Connect, outcomes: Outcomes
) -> None:
    """Another argument, another tool, a number of another type: refused, and nothing changed."""
    add(outcomes, "a", "my secret")
    for changed, said in (
        (Operation("a", "add", {"title": "other"}), "another title"),
        (Operation("a", "add", {"title": "my secret", "tag": None}), "another tag"),
        (Operation("a", "add", {}), "another title"),
        (Operation("a", "remove", {"title": "my secret"}), "another tool"),
    ):
        with pytest.raises(Conflict, match=said) as refused:
            outcomes.once(changed, lambda database: insert(database, "never"))
        assert "secret" not in str(refused.value)
    outcomes.once(Operation("n", "add", {"n": 1}), lambda database: 1)
    for other in (1.0, True, "1"):
        with pytest.raises(Conflict, match="another n"):
            outcomes.once(Operation("n", "add", {"n": other}), lambda database: 1)
    assert rows(connect) == [("my secret", None)]


def test_a_fence_only_grows_and_refuses_what_is_older_or_has_no_epoch(connect: Connect, outcomes: Outcomes) -> None:
    """Also a replay; its own epoch and newer ones pass; another key is not concerned."""
    outcomes.look_up("a", 5)
    outcomes.look_up("a", 3)
    for late in (4, 0, None):
        with pytest.raises(Stale, match="fenced at epoch 5"):
            add(outcomes, "a", epoch=late)
    assert rows(connect) == []
    assert add(outcomes, "a", epoch=5).replayed is False
    assert add(outcomes, "a", epoch=6).replayed is True
    with pytest.raises(Stale):
        add(outcomes, "a", epoch=4)
    add(outcomes, "b")
    assert rows(connect, "operation_fences") == [("a", 5)]


def test_an_effect_that_fails_leaves_nothing_and_the_key_free(connect: Connect, outcomes: Outcomes) -> None:
    """An exception, a clean no, a result that is no JSON: the row is undone, and the same key can be done after it."""

    def then(end: Callable[[], Any]) -> Callable[[Any], Any]:
        return lambda database: (insert(database, "half"), end())[1]

    for end, error in (
        (lambda: 1 / 0, ZeroDivisionError),
        (lambda: (_ for _ in ()).throw(Refused("full")), Refused),
        (lambda: {1, 2}, TypeError),
        (lambda: float("nan"), ValueError),
    ):
        with pytest.raises(error):
            outcomes.once(Operation("a", "add", {"title": "hello"}), then(end))
        assert outcomes.look_up("a") is None
    assert add(outcomes, "a").replayed is False
    assert rows(connect) == [("hello", None)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_effect_cannot_end_the_transaction(connect: Connect, outcomes: Outcomes, end: str) -> None:
    """Otherwise it could be on disk without its outcome. The attempt is an error and undoes all."""

    def ending(database: Any) -> Any:
        insert(database, "half")
        getattr(database, end)()

    with pytest.raises(Exception, match=r"(?i)not authorized|forbidden"):
        outcomes.once(Operation("a", "add", {}), ending)
    assert rows(connect) == rows(connect, "operation_outcomes") == []
    add(outcomes, "a")
    assert rows(connect) == [("hello", None)]


def test_an_effect_that_lost_its_transaction_is_no_outcome(connect: Connect, outcomes: Outcomes) -> None:
    """Rolled back by the words in SQL, or by SQLite itself while the effect goes on: an error, and nothing stands."""

    def losing(database: Any) -> Any:
        insert(database, "half")
        if isinstance(database, sqlite3.Connection):
            database.execute("create table once (n integer primary key)")
            with suppress(sqlite3.IntegrityError):
                for _ in range(2):
                    database.execute("insert or rollback into once values (1)")
        else:
            database.execute("rollback")
        with suppress(sqlite3.DatabaseError):  # it may not begin another one
            insert(database, "after")

    with pytest.raises(Exception, match=r"ended its transaction|not authorized"):
        outcomes.once(Operation("a", "add", {}), losing)
    assert outcomes.look_up("a") is None
    assert rows(connect) == []


def test_a_connection_with_an_open_transaction_is_refused(connect: Connect) -> None:
    """What it did before would be committed with us, or lost with us."""

    with closing(connect()) as connection:
        insert(connection, "before")
        with pytest.raises(RuntimeError, match="a transaction is open"):
            Outcomes(lambda: connection)


def test_rows_come_as_the_author_likes_them(connect: Connect) -> None:
    """A row factory of the author's is for the author's own statements."""

    def with_dicts() -> Any:
        connection = connect()
        if isinstance(connection, sqlite3.Connection):
            connection.row_factory = lambda cursor, row: {"a row": row}
        else:
            from psycopg.rows import dict_row

            connection.row_factory = dict_row
        return connection

    with closing(Outcomes(with_dicts)) as outcomes:
        outcomes.look_up("a", 1)
        assert add(outcomes, "a", epoch=2).result == outcomes.look_up("a").result == {"title": "hello"}


# -- many at once -----------------------------------------------------------------------------------------------------


def insist(connect: Connect, start: Any, keys: int) -> None:
    """Do every key, as others do at this moment."""
    start.wait()
    with closing(Outcomes(connect)) as outcomes:
        for number in range(keys):
            add(outcomes, f"k{number}")


def started(work: Callable[..., None], *about: Any, processes: int = 3) -> None:
    """Run `work` in processes that begin together; each must end well."""
    start = NURSERY.Barrier(processes)
    running = [NURSERY.Process(target=work, args=(about[0], start, *about[1:])) for _ in range(processes)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0] * processes


@pytest.mark.process
def test_many_processes_with_one_key_have_one_effect(connect: Connect) -> None:
    """Three processes, thirty keys, each done by all of them at the same moment: thirty notes."""
    started(insist, connect, 30)
    assert rows(connect) == [("hello", None)] * 30
    assert len(rows(connect, "operation_outcomes")) == 30


def race(outcomes: Outcomes, keys: int, seed: int, absent: list[tuple[str, int]], refused: list[str]) -> None:
    """Look up and write in turn under growing epochs, now and then late; notes what was told."""
    chance = random.Random(seed)
    for number in range(keys):
        key = f"k{number}"
        for epoch in range(1, 8):
            if chance.random() < 0.5:
                if outcomes.look_up(key, epoch) is None:
                    absent.append((key, epoch))
            elif chance.random() < 0.4:
                try:
                    operation = Operation(key, "add", {"title": key}, epoch)
                    outcomes.once(operation, lambda database, key=key, epoch=epoch: insert(database, key, epoch))
                except Stale:
                    refused.append(key)


@pytest.mark.process
def test_an_effect_never_follows_an_absent_of_a_higher_epoch(connect: Connect) -> None:
    """Six threads on two sets of connections look up and write the same keys: what was told absent stays absent."""
    absent: list[tuple[str, int]] = []
    refused: list[str] = []
    with closing(Outcomes(connect)) as first, closing(Outcomes(connect)) as second:
        threads = [
            threading.Thread(target=race, args=((first, second)[seed % 2], 60, seed, absent, refused))
            for seed in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    notes = dict(rows(connect))
    assert len(notes) == len(rows(connect))  # each key once at most
    assert notes
    assert absent
    assert refused
    assert not [(key, epoch, notes[key]) for key, epoch in absent if key in notes and notes[key] < epoch]


# -- through MCP ------------------------------------------------------------------------------------------------------


class Told(Result):
    outcome: dict[str, Any] | None


class Remote:
    """A client of a server with three tools, in one protocol era."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, name: str, key: Any = None, epoch: Any = None, **arguments: Any) -> Any:
        meta = {name: value for name, value in ((KEY_META, key), (EPOCH_META, epoch)) if value is not None}
        return await self.client.call_tool(name, arguments, meta=meta)

    async def code(self, name: str, key: Any = None, epoch: Any = None, **arguments: Any) -> str:
        result = await self.call(name, key, epoch, **arguments)
        assert result.is_error, result
        return str(result.structured_content["error"]["code"])

    async def outcome(self, **params: Any) -> Any:
        question = Request[dict[str, Any], str](method=OUTCOME_METHOD, params=params)
        return (await self.client.session.send_request(question, Told)).outcome


def build(path: Path) -> tuple[Recoverable, MCPServer]:
    recoverable = Recoverable(partial(lite, str(path)))

    @recoverable.tool(meta={"mine": 1})
    def note(db: sqlite3.Connection, title: str, tag: str = "") -> dict[str, str]:
        """Add a note."""
        return insert(db, title + tag)

    @recoverable.tool(key="op")
    def count(db: sqlite3.Connection, op: str) -> int:
        insert(db, op)
        return 7

    @recoverable.tool(name="no")
    def never(db: sqlite3.Connection, words: Annotated[list[str], Field(max_length=2)]) -> dict[str, str]:
        insert(db, "never")
        raise Refused(" ".join(words))

    return recoverable, MCPServer("notes", log_level="CRITICAL", extensions=[recoverable])


@pytest.fixture(params=["auto", "legacy"])
def era(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "notes.sqlite")) as connection:
        connection.execute(NOTES)
    return tmp_path / "notes.sqlite"


def titles(path: Path) -> list[str]:
    return [title for title, _ in rows(partial(lite, str(path)))]


async def test_tools_say_that_they_are_recoverable_in_both_eras(path: Path, era: str) -> None:
    """In each tool's `_meta`, beside the author's own; schemas have the tool's arguments and result, nothing else."""
    recoverable, server = build(path)
    with closing(recoverable.outcomes):
        async with Client(server, mode=era) as client:
            listed = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert {name: tool.meta[RECOVERABLE] for name, tool in listed.items()} == {
        "note": {"version": 1},
        "count": {"version": 1, "key": "op"},
        "no": {"version": 1},
    }
    assert listed["note"].meta["mine"] == 1
    assert (listed["note"].description, set(listed["note"].input_schema["properties"])) == (
        "Add a note.",
        {"title", "tag"},
    )
    assert listed["count"].output_schema["properties"]["result"]["type"] == "integer"


async def test_a_keyed_call_is_done_once_replayed_and_looked_up(path: Path, era: str) -> None:
    """By `_meta` or by argument; a replay says so; without a key each call is an operation of its own."""
    recoverable, server = build(path)
    with closing(recoverable.outcomes):
        async with Client(server, mode=era) as client:
            remote = Remote(client)
            first, again = await remote.call("note", "a", title="x"), await remote.call("note", "a", title="x")
            assert first.structured_content == again.structured_content == {"title": "x"}
            assert json.loads(again.content[0].text) == {"title": "x"}
            assert (REPLAYED_META in (first.meta or {}), again.meta[REPLAYED_META]) == (False, True)
            assert await remote.outcome(key="a") == {
                "tool": "note",
                "arguments": {"title": "x"},
                "result": {"title": "x"},
            }
            assert await remote.outcome(key="b", epoch=3) is None
            for _ in range(2):
                assert (await remote.call("count", op="c")).structured_content == {"result": 7}
            assert await remote.outcome(key="c") == {"tool": "count", "arguments": {}, "result": {"result": 7}}
            for _ in range(2):
                await remote.call("note", title="plain")
    assert titles(path) == ["c", "plain", "plain", "x"]


async def test_every_refusal_has_its_code_and_changes_nothing(path: Path, era: str) -> None:
    """Conflict, stale, refused, and everything that is invalid: arguments, unknown ones, keys and epochs."""
    recoverable, server = build(path)
    with closing(recoverable.outcomes):
        async with Client(server, mode=era) as client:
            remote = Remote(client)
            await remote.call("note", "a", title="x")
            await remote.outcome(key="a", epoch=5)
            await remote.outcome(key="new", epoch=5)
            assert await remote.code("note", "a", 5, title="y") == "conflict"
            assert await remote.code("count", "a", 5, op="a") == "conflict"
            assert (
                await remote.code("note", "new", 4, title="x") == await remote.code("note", "new", title="x") == "stale"
            )
            assert await remote.code("no", "n", words=["full"]) == "refused"
            for key, epoch, arguments in (
                ("k", None, {}),
                ("k", None, {"title": [1]}),
                ("k", None, {"title": "x", "titel": "x"}),
                ("", None, {"title": "x"}),
                (7, None, {"title": "x"}),
                ("a\0", None, {"title": "x"}),
                ("k", -1, {"title": "x"}),
                ("k", 1.5, {"title": "x"}),
                ("k", True, {"title": "x"}),
                ("k", 1 << 63, {"title": "x"}),
                (None, 3, {"title": "x"}),
            ):
                assert await remote.code("note", key, epoch, **arguments) == "invalid", (key, epoch, arguments)
            assert await remote.code("no", "n", words=["a", "b", "c"]) == "invalid"
            assert await remote.code("count", "other", op="c") == "invalid"
            for params in ({}, {"key": ""}, {"key": "a\0"}, {"key": "a", "epoch": -1}, {"key": "a", "epoch": "3"}):
                with pytest.raises(MCPError) as error:
                    await remote.outcome(**params)
                assert error.value.code == -32602
    assert titles(path) == ["x"]
    assert rows(partial(lite, str(path)), "operation_fences") == [("a", 5), ("new", 5)]


def test_a_tool_that_cannot_keep_the_contract_cannot_be_declared(path: Path) -> None:
    """Each says why, before any server is there."""
    recoverable = Recoverable(partial(lite, str(path)))

    async def waits(db: Any) -> int:
        return 1

    with closing(recoverable.outcomes):
        for function, key, said in (
            (waits, None, "a plain function"),
            (lambda: 1, None, "first parameter is the connection"),
            (insert, "op", "has no argument op"),
            (lambda db: 1, None, "the type of its result"),
        ):
            with pytest.raises(TypeError, match=said):
                recoverable.tool(key=key, name="t")(function)
    assert recoverable.tools() == []


async def test_the_ticket_server_answers_the_outcome_method(tmp_path: Path, era: str) -> None:
    """The same look-up as its tool, with the same fence; its write tool says so, its look-up needs not."""
    store = Tickets(tmp_path / "tickets.sqlite")
    with closing(store):
        async with Client(ticket_server.build(store), mode=era) as client:
            remote = Remote(client)
            listed = {tool.name: tool.meta for tool in (await client.list_tools()).tools}
            assert listed["create_review_ticket"][RECOVERABLE] == {"version": 1, "key": "operation_key"}
            await remote.call("create_review_ticket", "a", operation_key="a", **GOAL)
            done = await remote.outcome(key="a", epoch=2)
            assert (done["tool"], done["arguments"]) == ("create_review_ticket", GOAL)
            assert done["result"]["ticket"]["action"] == GOAL
            assert await remote.code("create_review_ticket", "a", 1, operation_key="a", **GOAL) == "stale"
            assert await remote.code("create_review_ticket", "b", 3, operation_key="a", **GOAL) == "invalid"


def test_an_older_tickets_file_keeps_its_fences(tmp_path: Path) -> None:
    """The first version's file is migrated; what was fenced stays fenced."""
    path = tmp_path / "tickets.sqlite"
    shutil.copy(ROOT / "tests" / "fixtures" / "tickets-1.sqlite", path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("insert into fences values ('old', 4)")
        connection.commit()
    with closing(Tickets(path)) as store:
        with pytest.raises(Stale, match="fenced at epoch 4"):
            store.create("old", GOAL, 3)
        assert store.create("old", GOAL, 4).action.model_dump() == GOAL


# -- through miniharness call -----------------------------------------------------------------------------------------

DECLARED = '[tools.notes.add]\nrecovery = "keyed"\noutcome = true\n'
RULES = '[rules]\nallow = ["mcp__notes", "mcp__tickets"]\n'


class Place:
    """A folder with both files, a server of notes over a database, and a state folder."""

    def __init__(self, folder: Path, database: str, fate: str = "", declared: str = DECLARED) -> None:
        self.folder = folder
        self.serve(str(ROOT / "tests" / "recoverable_server.py"), database, fate, str(folder / "met"))
        (folder / "harness.toml").write_text(declared + RULES)

    def serve(self, *argv: str, name: str = "notes") -> None:
        servers = {name: {"command": sys.executable, "args": argv, "env": {"PYTHONPATH": str(ROOT)}}}
        (self.folder / ".mcp.json").write_text(json.dumps({"mcpServers": servers}))

    def call(self, tool: str = "notes.add", **arguments: Any) -> dict[str, Any]:
        words = ("call", tool, "--args", json.dumps(arguments), "--execute", "--config", str(self.folder), "--json")
        done = Lab(self.folder / "state").operate(*words)
        assert done.stdout, done.stderr
        return json.loads(done.stdout) | {"code": done.returncode}


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Connect]:
    """A database without tables, as the server is told it and as the test opens it."""
    if request.param == "sqlite":
        name = str(tmp_path / "notes.sqlite")
        return name, partial(lite, name)
    name = request.getfixturevalue("url")
    with closing(full(name)) as connection:
        connection.execute("drop table if exists notes, operation_fences, operation_outcomes")
        connection.commit()
    return name, partial(full, name)


@pytest.mark.process
@pytest.mark.parametrize(("fate", "attempts"), [("before", 2), ("inside", 2), ("after", 1)])
def test_a_server_killed_around_its_commit_ends_with_one_note(
    tmp_path: Path, database: tuple[str, Connect], fate: str, attempts: int
) -> None:
    """SIGKILL before, inside and after the transaction: the outcome method decides, one command, one note."""
    place = Place(tmp_path, database[0], fate)
    result = place.call(title="hello")
    assert (result["state"], result["attempts"]) == ("succeeded", attempts), result
    assert (tmp_path / "met").exists()
    assert [title for _, title in rows(database[1])] == ["hello"]
    assert [row[0] for row in rows(database[1], "operation_outcomes")] == [f"{result['run']}:resource"]
    assert place.call(title="hello")["attempts"] == attempts
    assert len(rows(database[1])) == 1


@pytest.mark.process
def test_a_clean_no_ends_the_run(tmp_path: Path) -> None:
    """`refused` is clean without being declared: the outcome method tells that nothing is there, and never will be."""
    result = Place(tmp_path, str(tmp_path / "notes.sqlite"), "refuse").call(title="hello")
    assert (result["state"], result["code"]) == ("failed", 1)
    assert "the notebook is full" in result["reason"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("fate", "told"),
    [
        ("unmarked", f"the server's tool add has no {RECOVERABLE} in its _meta"),
        ("mute", f"the server does not know the method {OUTCOME_METHOD} of {RECOVERABLE}"),
        ("empty", "the answer breaks the protocol"),
    ],
)
def test_a_server_that_does_not_keep_the_contract_is_told_so_and_never_taken_for_absent(
    tmp_path: Path, fate: str, told: str
) -> None:
    """Nothing is decided and nothing is sent."""
    result = Place(tmp_path, str(tmp_path / "notes.sqlite"), fate).call(title="hello")
    wanted = (75, "ToolUnavailable") if fate == "empty" else (2, "Misdeclared")
    assert (result["code"], result["interrupted"]["error"]) == wanted, result
    assert told in result["interrupted"]["message"]
    assert result.get("attempts", 0) == 0
    assert rows(partial(lite, str(tmp_path / "notes.sqlite"))) == []


@pytest.mark.process
def test_the_ticket_server_is_driven_by_its_outcomes(tmp_path: Path) -> None:
    """Four lines of TOML instead of nine; the ticket is compared by the arguments that the server keeps."""
    declared = '[tools.tickets.create_review_ticket]\nrecovery = "keyed"\noutcome = true\nkey = "operation_key"\n'
    place = Place(tmp_path, "", declared=declared)
    place.serve(str(ROOT / "server.py"), "--db", str(tmp_path / "tickets.sqlite"), name="tickets")
    result = place.call("tickets.create_review_ticket", **GOAL)
    assert (result["state"], result["resource"]["action"]) == ("succeeded", GOAL), result


@pytest.mark.process
def test_the_documents_server_and_declaration_work_as_written(tmp_path: Path) -> None:
    """The whole server of docs/recoverable-tools.md, and the three lines for it."""
    (source,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    (declared,) = re.findall(r"```toml\n(.*?)```", DOCS, re.DOTALL)
    (tmp_path / "server.py").write_text(source)
    place = Place(tmp_path, "", declared=declared)
    place.serve(str(tmp_path / "server.py"), str(tmp_path / "notes.sqlite"))
    result = place.call("notes.add_note", title="hello")
    assert (result["state"], result["resource"]) == ("succeeded", {"id": 1, "action": {"title": "hello"}}), result
    assert rows(partial(lite, str(tmp_path / "notes.sqlite"))) == [(1, "hello")]


def test_the_store_alone_needs_no_sdk() -> None:
    """Outcomes without MCP import neither the SDK nor psycopg."""
    code = "import sys, miniharness.server.outcomes; print([m for m in ('mcp', 'psycopg') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
