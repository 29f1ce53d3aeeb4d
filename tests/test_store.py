"""The ticket server's file: one row for each key, fences that only grow, and other files left as they are."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import GOAL
from forked import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miniharness import database
from miniharness.database import Database, inspect
from miniharness.errors import StoreError
from store import APPLICATION_ID, MIGRATIONS, Conflict, Runs, Stale, Ticket, Tickets

OTHER = GOAL | {"title": "another title"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tickets.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Tickets]:
    opened = Tickets(path)
    yield opened
    opened.close()


def rows(path: Path, table: str = "tickets") -> list[tuple[Any, ...]]:
    """Every row of a table, read through a connection of its own."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"select * from {table} order by 1").fetchall()


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def content(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file that holds data: not of SQLite's shared memory, nor of an empty log."""
    files = [path for path in folder.iterdir() if path.is_file() and path.suffix != ".sqlite-shm"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.stat().st_size}


# -- tickets and fences -----------------------------------------------------------------------------------------------


def test_a_key_has_one_row_however_often_it_is_created(path: Path, store: Tickets) -> None:
    """The same key and content again returns the ticket that is there; another key is another row."""
    first = store.create("a", GOAL)
    assert store.create("a", dict(reversed(GOAL.items()))) == first
    assert store.create("b", GOAL).id != first.id
    assert store.look_up("a") == first == Ticket.model_validate({"id": first.id, "action": GOAL})
    assert store.look_up("c") is None
    assert [op for _, op, _ in rows(path)] == ["a", "b"]


def test_the_payload_is_json_with_the_two_fields(path: Path, store: Tickets) -> None:
    """A row holds the source and the title as readable canonical JSON, whole, with quotes and emoji in them."""
    action = {"title": '核验 "资料" \\ 👩\u200d🔬', "source": "it's"}
    store.create("a", action)
    ((_, _, payload),) = rows(path)
    assert json.loads(payload) == action
    assert payload.startswith('{"source":"it\'s","title":"核验')


def test_a_key_that_holds_another_action_is_a_conflict_that_names_the_difference(path: Path, store: Tickets) -> None:
    """Each field that differs is named with both values, and the row stays as it was."""
    store.create("a", GOAL)
    before = rows(path)
    with pytest.raises(Conflict, match='title is "核验 Agent Harness 资料", wanted "another title"') as refused:
        store.create("a", OTHER)
    assert "source" not in str(refused.value)
    assert rows(path) == before


def test_the_file_itself_refuses_a_second_row_for_a_key(path: Path, store: Tickets) -> None:
    """The key is unique in the schema, whatever program writes."""
    store.create("a", GOAL)
    with pytest.raises(sqlite3.IntegrityError):
        change(path, "insert into tickets (op, payload) values ('a', '{}')")


def test_a_look_up_without_an_epoch_raises_no_fence(path: Path, store: Tickets) -> None:
    """Only a look-up that carries an epoch writes anything."""
    store.look_up("a")
    assert rows(path, "operation_fences") == []
    store.create("a", GOAL)
    assert rows(path, "operation_fences") == []


numbers = itertools.count()
epochs = st.none() | st.integers(0, 4)
moves = st.lists(st.tuples(st.sampled_from(["look_up", "create", "create other"]), epochs), max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves)
def test_fences_only_grow_and_decide_every_write(
    path: Path, store: Tickets, moves: list[tuple[str, int | None]]
) -> None:
    """Any sequence of look-ups and writes gives what a dictionary and a maximum would give."""
    op, fence, held = f"op-{next(numbers)}", None, None
    for move, epoch in moves:
        wanted = OTHER if move == "create other" else GOAL
        try:
            ticket = store.look_up(op, epoch) if move == "look_up" else store.create(op, wanted, epoch)
            outcome = ticket and ticket.action.model_dump()
        except (Stale, Conflict) as refused:
            outcome = refused.code
        if move == "look_up":
            fence = fence if epoch is None else max(epoch, fence or 0)
            assert outcome == held
        elif fence is not None and (epoch is None or epoch < fence):
            assert outcome == "stale"
        elif held not in (None, wanted):
            assert outcome == "conflict"
        else:
            held = wanted
            assert outcome == wanted
    assert dict(rows(path, "operation_fences")).get(op) == fence
    stored = {key: json.loads(payload) for _, key, payload in rows(path)}
    assert stored.get(op) == held


@pytest.mark.parametrize(("epoch", "said"), [(4, "of epoch 4"), (None, "without an epoch")])
def test_a_late_write_is_refused_even_where_the_ticket_is_already_there(
    path: Path, store: Tickets, epoch: int | None, said: str
) -> None:
    """A write below the fence learns nothing and changes nothing, and the refusal names both epochs."""
    store.create("a", GOAL, 5)
    store.look_up("a", 5)
    before = rows(path)
    with pytest.raises(Stale, match=f"fenced at epoch 5; this write {said}"):
        store.create("a", GOAL, epoch)
    assert rows(path) == before
    assert store.create("a", GOAL, 5) == store.look_up("a")


def test_one_keys_fence_is_no_other_keys_business(store: Tickets) -> None:
    """A fence stands for its key alone."""
    store.look_up("a", 1 << 62)
    assert store.create("b", GOAL).action.model_dump() == GOAL


# -- the file ---------------------------------------------------------------------------------------------------------


def test_a_new_file_knows_its_owner_and_its_version(path: Path, store: Tickets) -> None:
    """The application id, the schema version and WAL mode stand in the file."""
    connection = sqlite3.connect(path)
    pragmas = {
        n: connection.execute(f"pragma {n}").fetchone()[0] for n in ("application_id", "user_version", "journal_mode")
    }
    connection.close()
    assert pragmas == {"application_id": APPLICATION_ID, "user_version": len(MIGRATIONS), "journal_mode": "wal"}
    assert inspect(path) == (len(MIGRATIONS), "ok")


def test_what_was_written_is_there_after_the_file_is_opened_again(path: Path) -> None:
    """Tickets and fences outlive the process that wrote them."""
    first = Tickets(path)
    ticket = first.create("a", GOAL, 3)
    first.look_up("a", 7)
    first.close()
    second = Tickets(path)
    assert second.look_up("a") == ticket
    with pytest.raises(Stale):
        second.create("a", GOAL, 6)
    second.close()


def test_an_older_file_is_migrated_and_keeps_its_rows(path: Path, store: Tickets) -> None:
    """A further migration is applied once, in order, to a file that has rows."""
    store.create("a", GOAL)
    store.close()
    before = rows(path)
    for _ in range(2):
        newer = Database(path, APPLICATION_ID, (*MIGRATIONS, "create table more (x text) strict"))
        assert newer.version == len(MIGRATIONS) + 1
        newer.close()
    assert rows(path) == before
    assert rows(path, "more") == []


def test_a_migration_that_fails_leaves_the_version_and_the_rows(path: Path, store: Tickets) -> None:
    """A migration and its version are one transaction: half of one is none of it."""
    store.create("a", GOAL)
    store.close()
    before = rows(path)
    with pytest.raises(StoreError):
        Database(
            path, APPLICATION_ID, (*MIGRATIONS, "create table more (x text) strict; insert into nowhere values (1)")
        )
    assert inspect(path) == (len(MIGRATIONS), "ok")
    assert rows(path) == before
    with pytest.raises(sqlite3.OperationalError, match="more"):
        rows(path, "more")


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 32)


def text_file(path: Path) -> None:
    path.write_text("dear diary\n" * 100)


def damaged_schema(path: Path) -> None:
    ours(path)
    data = bytearray(path.read_bytes())
    data[100:4096] = b"\xa5" * (4096 - 100)
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    ours(path)
    path.write_bytes(path.read_bytes()[:5000])


def foreign(path: Path) -> None:
    change(path, "create table notes (x)", "insert into notes values ('keep me')")


def foreign_with_our_tables(path: Path) -> None:
    change(path, *MIGRATIONS[0].split(";")[:2])


def foreign_and_empty(path: Path) -> None:
    change(path, "pragma application_id = 7")


def the_journal(path: Path) -> None:
    runs = Runs(path.parent / "journal")
    runs.close()
    shutil.copy(path.parent / "journal" / "runs.sqlite", path)


def newer(path: Path) -> None:
    ours(path)
    change(path, f"pragma user_version = {len(MIGRATIONS) + 1}")


def ours(path: Path) -> None:
    store = Tickets(path)
    store.create("a", GOAL)
    store.close()


def with_an_unmerged_log(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """The file as a killed program leaves it: its last commits stand only in the write-ahead log beside it."""

    def left_behind(path: Path) -> None:
        source = path.parent / "source"
        source.mkdir()
        make(source / path.name)
        connection = sqlite3.connect(source / path.name, isolation_level=None)
        connection.execute("pragma journal_mode = wal")
        connection.execute("create table late (x)")
        for suffix in ("", "-wal"):
            shutil.copy(f"{source / path.name}{suffix}", f"{path}{suffix}")
        connection.close()

    return left_behind


NOT_OURS = {
    "bytes without a meaning": (garbage, "not a SQLite database"),
    "a text file": (text_file, "not a SQLite database"),
    "a damaged schema": (damaged_schema, "damaged"),
    "a file that was cut off": (cut_off, "damaged"),
    "another program's": (foreign, "another program"),
    "another program's with our tables": (foreign_with_our_tables, "another program"),
    "another program's, still empty": (foreign_and_empty, "another program"),
    "the engine's journal": (the_journal, "another program"),
    "a newer version's": (newer, "newer version"),
    "another program's after a kill": (with_an_unmerged_log(foreign), "another program"),
    "a newer version's after a kill": (with_an_unmerged_log(newer), "newer version"),
}


@pytest.mark.parametrize(("make", "said"), NOT_OURS.values(), ids=NOT_OURS)
def test_a_file_that_cannot_be_used_is_refused_and_not_changed_by_a_byte(
    path: Path, make: Callable[[Path], None], said: str
) -> None:
    """One clear `StoreError` with the file's name; nothing is written to it, beside it or over it."""
    make(path)
    before = content(path.parent)
    for _ in range(2):
        with pytest.raises(StoreError, match=said) as refused:
            Tickets(path)
        assert str(path) in str(refused.value)
        assert content(path.parent) == before


def test_damage_deep_in_the_file_is_one_clear_error_and_leaves_the_rest_readable(path: Path) -> None:
    """A damaged page of rows is told as damage when it is read; the file keeps every byte."""
    store = Tickets(path)
    for number in range(200):
        store.create(f"op-{number:03}", GOAL | {"title": "x" * 300})
    store.close()
    data = bytearray(path.read_bytes())
    found = next(at for at in range(8192, len(data), 4096) if data[at] == 0x0D)  # a leaf page of a table
    data[found : found + 4096] = b"\xa5" * 4096
    path.write_bytes(data)
    before, told, whole = content(path.parent), [], 0
    store = Tickets(path)
    for number in range(200):
        try:
            whole += store.look_up(f"op-{number:03}") is not None
        except StoreError as error:
            told.append(str(error))
    store.close()
    assert told
    assert all("damaged; keep it as it is and restore a backup" in line for line in told)
    assert whole + len(told) == 200
    assert whole > 0
    assert content(path.parent) == before
    assert inspect(path)[1] != "ok"


@pytest.mark.parametrize("place", ["missing/tickets.sqlite", "."], ids=["a missing folder", "a folder"])
def test_a_path_where_no_file_can_be_is_one_clear_error(tmp_path: Path, place: str) -> None:
    """What cannot be opened is told so, and nothing is made in its place."""
    with pytest.raises(StoreError, match="cannot be opened"):
        Tickets(tmp_path / place)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lock", ["begin immediate", "begin exclusive"])
def test_a_file_that_another_program_holds_is_an_error_after_the_limit_and_works_afterwards(
    path: Path, monkeypatch: pytest.MonkeyPatch, lock: str
) -> None:
    """A write that waits too long tells why and changed nothing; it succeeds once the lock is gone."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    store = Tickets(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute(lock)
    for write in (lambda: store.create("a", GOAL), lambda: store.look_up("a", 3)):
        with pytest.raises(StoreError, match="another program holds it locked"):
            write()
    assert store.look_up("a") is None
    other.execute("rollback")
    other.close()
    assert rows(path) == rows(path, "operation_fences") == []
    assert store.create("a", GOAL).action.model_dump() == GOAL
    store.close()


@pytest.mark.parametrize("fresh", [True, False], ids=["a new file", "a file of ours"])
def test_a_file_that_is_held_exclusively_cannot_be_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    """Opening waits for the limit and no longer, and leaves the file as it was."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    if not fresh:
        ours(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("pragma locking_mode = exclusive")
    other.execute("begin exclusive")
    with pytest.raises(StoreError, match="another program holds it locked"):
        Tickets(path)
    other.execute("rollback")
    other.close()
    Tickets(path).close()
    assert [op for _, op, _ in rows(path)] == ([] if fresh else ["a"])


def test_opening_a_new_file_works_whenever_another_process_makes_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each statement of one opening, another opening happens in whole; both work and both rows are there."""
    connect, countdown = sqlite3.connect, 0

    class Interleaved(sqlite3.Connection):
        def execute(self, *args: Any) -> sqlite3.Cursor:
            nonlocal countdown
            if not self.in_transaction and (countdown := countdown - 1) == 0:
                other = Tickets(path)
                other.create("theirs", GOAL)
                other.close()
            return super().execute(*args)

    moments = 0
    while countdown <= 0:
        path = tmp_path / f"{moments}.sqlite"
        countdown = moments + 1
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", lambda *args, **named: connect(*args, **{"factory": Interleaved} | named))
            store = Tickets(path)
        store.create("ours", GOAL)
        store.close()
        if countdown <= 0:
            assert sorted(op for _, op, _ in rows(path)) == ["ours", "theirs"]
            moments += 1
    assert moments >= 5


def test_a_file_whose_maker_was_killed_before_its_first_commit_is_made_again(path: Path, tmp_path: Path) -> None:
    """A rollback journal that a killed process left beside an unborn file is played back, and the file is used."""
    connection = sqlite3.connect(tmp_path / "unborn", isolation_level=None)
    connection.execute("pragma cache_size = 1")  # so that uncommitted pages reach the file
    connection.execute("begin")
    connection.execute("create table t (x)")
    connection.execute("insert into t values (zeroblob(100000))")
    for suffix in ("", "-journal"):
        shutil.copy(tmp_path / f"unborn{suffix}", f"{path}{suffix}")
    connection.close()
    assert path.stat().st_size > 0
    store = Tickets(path)
    assert store.create("a", GOAL).action.model_dump() == GOAL
    store.close()
    assert inspect(path) == (len(MIGRATIONS), "ok")
    assert len(rows(path)) == 1


@pytest.mark.process
def test_two_processes_that_make_the_same_file_at_once_both_work(tmp_path: Path) -> None:
    """Sixty times over, two processes open one new file at the same moment; both can use it and both rows stand."""
    program = (
        "import sys; from pathlib import Path; from store import Tickets\n"
        "print('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    store = Tickets(Path(line.strip()))\n"
        "    store.create(sys.argv[1], {'source': 's', 'title': 't'})\n"
        "    store.close()\n"
        "    print('done', flush=True)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with (
        subprocess.Popen([sys.executable, "-c", program, "a"], cwd=ROOT, text=True, **pipes) as first,
        subprocess.Popen([sys.executable, "-c", program, "b"], cwd=ROOT, text=True, **pipes) as second,
    ):
        assert [process.stdout.readline() for process in (first, second)] == ["ready\n"] * 2
        for number in range(60):
            for process in (first, second):
                process.stdin.write(f"{tmp_path / str(number)}\n")
                process.stdin.flush()
            answers = [process.stdout.readline() for process in (first, second)]
            assert answers == ["done\n"] * 2, [process.communicate()[1] for process in (first, second)]
            assert sorted(op for _, op, _ in rows(tmp_path / str(number))) == ["a", "b"]
