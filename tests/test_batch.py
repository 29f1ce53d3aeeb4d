"""Many runs at once: a batch streams, goes on after any death, shares commits, and never mixes up its lines."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import Lab
from forked import Forked

import lab as ticket_lab
from miniharness import batch
from miniharness.database import Database
from miniharness.engine import Ports
from miniharness.errors import Fenced, Interrupted, StoreError, UsageError
from miniharness.machine import Decide, Dispatch, Event, EventType, LookUp
from store import Conflict, Runs, Tickets


def goals(number: int) -> list[dict[str, str]]:
    return [{"run": f"b-{n}", "source": f"s-{n}", "title": f"Title {n}"} for n in range(number)]


async def stream(items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


def written(lab: Lab, number: int) -> Path:
    path = lab.state_dir.parent / "goals.jsonl"
    path.write_text("".join(json.dumps(goal) + "\n" for goal in goals(number)))
    return path


def balanced(lab: Lab, number: int) -> None:
    """Each goal has exactly its one ticket, and each run's history gives its row."""
    assert sorted(lab.tickets()) == sorted(
        (f"{goal['run']}:ticket", {"source": goal["source"], "title": goal["title"]}) for goal in goals(number)
    )
    with closing(Runs(lab.state_dir)) as runs:
        assert [run.state for run in runs.all()] == ["succeeded"] * number
        assert [fault for run in runs.all() for fault in runs.replay(run.id)] == []


# -- in flight ---------------------------------------------------------------------------------------------------------


async def test_no_more_than_the_limit_are_under_way_and_none_is_taken_before_there_is_a_place() -> None:
    """Memory does not grow with the number of items: at most one is taken beyond those under way."""
    taken = under_way = most = 0

    async def items() -> AsyncIterator[int]:
        nonlocal taken
        for number in range(200):
            taken += 1
            yield number

    async def work(number: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return number

    results = []
    async for result in batch.in_flight(items(), work, 7, asyncio.Event()):
        results.append(result)
        assert taken <= len(results) + 7 + 1
    assert sorted(results) == list(range(200))
    assert most == 7


async def test_once_stopped_nothing_is_taken_and_what_is_under_way_ends() -> None:
    """The results of everything that had begun still arrive."""
    stop, begun = asyncio.Event(), []

    async def work(number: int) -> int:
        begun.append(number)
        if number == 3:
            stop.set()
        await asyncio.sleep(0.01)
        return number

    results = [result async for result in batch.in_flight(stream(range(100)), work, 2, stop)]
    assert sorted(results) == sorted(begun)
    assert len(begun) <= 5


async def test_a_stop_while_a_slow_pipe_is_read_lets_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next item never comes and one is under way: it ends in its own time, and nobody spins or waits for ever."""
    stop, go_on = asyncio.Event(), asyncio.Event()
    waits, wait = [], asyncio.wait
    monkeypatch.setattr(asyncio, "wait", lambda *args, **how: (waits.append(args), wait(*args, **how))[1])

    async def items() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    async def work(number: int) -> int:
        stop.set()
        await go_on.wait()
        return number

    asyncio.get_running_loop().call_later(0.05, go_on.set)
    async with asyncio.timeout(5):
        assert [result async for result in batch.in_flight(items(), work, 4, stop)] == [1]
    assert len(waits) < 10


async def test_a_slow_pipe_keeps_no_result_back() -> None:
    """A result is told while the next line has not come yet."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as file, os.fdopen(writing, "w", buffering=1) as source:
        source.write("one\n")

        async def work(line: str) -> str:
            return line.strip()

        results = batch.in_flight(batch.lines(file), work, 4, asyncio.Event())
        assert await asyncio.wait_for(anext(results), 5) == "one"
        source.write("two\n")
        assert await asyncio.wait_for(anext(results), 5) == "two"
        source.close()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(results), 5)


@pytest.mark.parametrize("step", [Decide(Event(EventType.PERMIT_AWAITED)), LookUp("k", 1), Dispatch("k", 1, {})])
async def test_a_stopped_run_begins_no_step_but_one_that_is_paid_for(step: Any) -> None:
    """The safe point is before a decision or a look-up; a dispatch whose debit is on disk is sent."""

    class Tool:
        async def connect(self) -> dict[str, Any]:
            return {}

    stop = asyncio.Event()
    stop.set()
    ports = Ports(None, Tool(), stop)  # type: ignore[arg-type]
    if isinstance(step, Dispatch):
        assert (await ports.perform(step)).type is EventType.CONNECTED
    else:
        with pytest.raises(Interrupted):
            await ports.perform(step)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("nonsense", "not JSON"),
        ("[1]", "must be an object"),
        ('{"source": "s", "title": "t"}', "must be an object"),
        ('{"run": 1, "source": "s", "title": "t"}', "must be an object"),
        ('{"run": "../x", "source": "s", "title": "t"}', "the run id"),
        ('{"run": "r", "source": "s"}', "no title"),
        ('{"run": "r", "source": "s", "title": ""}', "title is empty"),
        ('{"run": "r", "source": "s", "title": "t", "approved": true}', "approved"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_refused_with_its_reason(item: str, said: str) -> None:
    """Nothing of a goal is taken from a default, and nothing beyond it is taken at all."""
    with pytest.raises(UsageError, match=said):
        ticket_lab._run_and_goal(item)


# -- shared commits ----------------------------------------------------------------------------------------------------

TABLE = ("create table t (n integer primary key)",)


def counting(db: Database) -> list[str]:
    """Every statement that the connection runs from now on."""
    seen: list[str] = []
    db._connection.set_trace_callback(seen.append)
    return seen


async def test_those_who_write_together_share_one_commit(tmp_path: Path) -> None:
    """Thirty-two writes that are ready at once are one transaction; a lone one is one, too."""
    with closing(Database(tmp_path / "d.sqlite", 7, TABLE)) as db:
        seen = counting(db)
        await asyncio.gather(
            *(db.write(lambda n=n: db.execute("insert into t values (?)", (n,)).rowcount) for n in range(32))
        )
        assert [sql for sql in seen if sql in ("begin immediate", "commit")] == ["begin immediate", "commit"]
        await db.write(lambda: db.execute("insert into t values (99)"))
        assert seen.count("commit") == 2
        assert db.execute("select count(*) from t").fetchone()[0] == 33


async def test_one_refusal_takes_nobody_down(tmp_path: Path) -> None:
    """A refused write is refused alone, a failing one is undone alone, and the others are on disk."""

    def refused() -> None:
        raise Fenced

    with closing(Database(tmp_path / "d.sqlite", 7, TABLE)) as db:
        works: list[Any] = [lambda n=n: db.execute("insert into t values (?)", (n,)).rowcount for n in range(4)]
        works[1:1] = [refused, lambda: db.execute("insert into t values (0)"), lambda: 1 / 0]
        ends = await asyncio.gather(*(db.write(work) for work in works), return_exceptions=True)
        assert [type(end) for end in ends] == [int, Fenced, StoreError, ZeroDivisionError, int, int, int]
        assert [row[0] for row in db.execute("select n from t order by n")] == [0, 1, 2, 3]


async def test_calls_of_the_ticket_store_share_commits_and_refuse_alone(tmp_path: Path) -> None:
    """The server's side has the same writer: a conflict is its own, and the other tickets are there."""
    with closing(Tickets(tmp_path / "t.sqlite")) as store:
        store.create("a", {"source": "s", "title": "t"})
        seen = counting(store._db)
        works: list[Any] = [
            lambda op=op: store.create(op, {"source": "s", "title": "another"}) for op in ("b", "a", "c")
        ]
        ends = await asyncio.gather(*(store.together(work) for work in works), return_exceptions=True)
        assert [isinstance(end, Conflict) for end in ends] == [False, True, False]
        assert seen.count("commit") == 1
        assert [store.look_up(op) is not None for op in ("a", "b", "c", "d")] == [True, True, True, False]


# -- whole batches -----------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_batch_makes_each_ticket_once_and_again_does_nothing(lab: Lab) -> None:
    """The same command continues: finished runs are read without a server."""
    path = written(lab, 40)
    first = lab.run("--batch", str(path), "--execute", "--json")
    told = [json.loads(line) for line in first.stdout.splitlines()]
    assert (first.returncode, sorted(one["line"] for one in told)) == (0, list(range(1, 41)))
    assert {(one["state"], one["attempts"]) for one in told} == {("succeeded", 1)}
    balanced(lab, 40)
    (lab.state_dir / "tickets.sqlite").rename(lab.state_dir / "away")
    again = lab.run("--batch", str(path), "--execute")
    assert (again.returncode, "succeeded" in again.stdout, " 40 " in again.stdout) == (0, True, True)
    assert not (lab.state_dir / "tickets.sqlite").exists()


@pytest.mark.process
def test_bad_lines_are_told_and_the_others_go_on(lab: Lab) -> None:
    """Not JSON, wrong fields, one run with two goals, one run twice: each line has its own answer; exit 1."""
    path = written(lab, 3)
    other = {"run": "b-0", "source": "other", "title": "x"}
    path.write_text(
        path.read_text() + f"nonsense\n\n{json.dumps(goals(1)[0])}\n{json.dumps(other)}\n" + '{"run": "q"}\n'
    )
    ended = lab.run("--batch", str(path), "--execute", "--json")
    told = {one["line"]: one for one in map(json.loads, ended.stdout.splitlines())}
    assert ended.returncode == 1
    assert sorted(told) == [1, 2, 3, 4, 6, 7, 8]
    assert [told[line]["state"] for line in (1, 2, 3, 6)] == ["succeeded"] * 4
    errors = {line: (told[line]["interrupted"] or {}).get("error") for line in told}
    assert {errors[line] for line in (4, 8)} == {"UsageError"}
    assert (errors[7], told[7]["state"]) == ("ContractMismatch", None)
    assert "line 4: UsageError" in ended.stderr
    balanced(lab, 3)


@pytest.mark.process
def test_without_a_permit_a_batch_waits_and_goes_on_with_one(lab: Lab) -> None:
    """Waiting runs are taken further by the same command with --execute."""
    path = written(lab, 10)
    waiting = lab.run("--batch", str(path))
    assert (waiting.returncode, "waiting_execution" in waiting.stdout, lab.tickets()) == (0, True, [])
    assert "next for one that is waiting_execution: python lab.py" in waiting.stdout
    assert lab.run("--batch", str(path), "--execute", "--servers", "2").returncode == 0
    balanced(lab, 10)


def _servers(process: Forked) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


@pytest.mark.process
def test_a_batch_killed_over_and_over_makes_each_ticket_once(lab: Lab) -> None:
    """Engine and servers die by SIGKILL while runs are in flight; the last command ends it, and the books balance."""
    path = written(lab, 150)
    command = ("--batch", str(path), "--execute")
    kills = 0
    for victim in ("engine", "engine", "server"):
        process = lab.start(*command)
        before = len(lab.tickets())
        give_up = time.monotonic() + 30
        while len(lab.tickets()) < before + 10 and process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.02)
        for pid in [process.pid] if victim == "engine" else _servers(process):
            os.kill(pid, signal.SIGKILL)
            kills += 1
        process.wait(timeout=60)
        assert process.returncode == (-signal.SIGKILL if victim == "engine" else 0)
    assert kills == 3
    assert lab.run(*command).returncode == 0
    balanced(lab, 150)
    with closing(Runs(lab.state_dir)) as runs:
        assert all(run.dispatches_spent <= run.dispatches_limit for run in runs.all())


@pytest.mark.process
def test_a_signal_lets_the_runs_in_flight_come_to_a_safe_point(lab: Lab) -> None:
    """Exit 75, a table, no half-known run that a resume would not finish, and no dispatch lost to the signal."""
    path = written(lab, 200)
    process = lab.start("--batch", str(path), "--execute")
    while len(lab.tickets()) < 10 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "interrupted by SIGINT" in err
    assert " in " in out.splitlines()[-1]
    assert lab.run("--batch", str(path), "--execute").returncode == 0
    balanced(lab, 200)
    with closing(Runs(lab.state_dir)) as runs:
        assert {run.dispatches_spent for run in runs.all()} == {1}


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_a_batch_that_waits_for_a_pipe(lab: Lab, tmp_path: Path, number: signal.Signals) -> None:
    """What was read is done and told, and nobody waits for a line that does not come."""
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    process = lab.start("--batch", str(fifo), "--execute")
    with fifo.open("w", buffering=1) as source:
        for goal in goals(3):
            source.write(json.dumps(goal) + "\n")
        give_up = time.monotonic() + 30
        while len(lab.tickets()) < 3 and time.monotonic() < give_up:
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, f"interrupted by {number.name}" in err) == (75, True), err
    assert "all " in out
    assert lab.run("--batch", str(written(lab, 3)), "--execute").returncode == 0
    balanced(lab, 3)


@pytest.mark.process
def test_a_server_that_dies_again_and_again_ends_the_batch(lab: Lab) -> None:
    """After five starts in a row a clear error, exit 75, and every run with its next step."""
    lab.state_dir.mkdir()
    (lab.state_dir / "tickets.sqlite").write_text("no database\n" * 500)
    ended = lab.run("--batch", str(written(lab, 5)), "--execute")
    assert ended.returncode == 75
    assert "the server ended 5 times in a row" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.process
@pytest.mark.parametrize("flag", [("--run", "x"), ("--title", "t"), ("--take-over",), ("--concurrency", "0")])
def test_flags_of_one_run_do_not_fit_a_batch(lab: Lab, flag: tuple[str, ...]) -> None:
    """A wrong command opens nothing."""
    ended = lab.run("--batch", str(written(lab, 1)), *flag)
    assert (ended.returncode, flag[0] in ended.stderr) == (2, True)
    assert not (lab.state_dir / "runs.sqlite").exists()


async def test_execute_many_from_python(tmp_path: Path) -> None:
    """`async for` over goals as objects; a wrong one is reported and the others go on."""
    items = [*goals(3), {"run": "bad"}]
    results = {r["line"]: r async for r in ticket_lab.execute_many(tmp_path, stream(items), execute_write=True)}
    assert [results[line]["state"] for line in (1, 2, 3, 4)] == ["succeeded"] * 3 + [None]
    assert results[4]["interrupted"]["error"] == "UsageError"


# -- pruning -----------------------------------------------------------------------------------------------------------


def test_pruning_keeps_the_verdict_and_gives_the_space_back(tmp_path: Path) -> None:
    """Finished runs of long ago lose their history, open ones and young ones keep it, and the file shrinks."""

    async def make(folder: Path) -> None:
        items = goals(60)
        async for _ in ticket_lab.execute_many(folder, stream(items), execute_write=True):
            pass
        await ticket_lab.execute(folder, run="open")

    asyncio.run(make(tmp_path))
    path = tmp_path / "runs.sqlite"
    with closing(Runs(tmp_path)) as runs:
        before = {run.id: run for run in runs.all()}
        assert runs.prune(time.time() - 3600) == 0
        size = sum(file.stat().st_size for file in tmp_path.glob("runs.sqlite*"))
        assert runs.prune(time.time() + 1) == 60
        assert runs.prune(time.time() + 1) == 0
        for run in runs.all():
            was = before[run.id]
            assert (run.state, run.head, run.version) == (was.state, was.head, was.version)
            assert run.pruned is (run.id != "open")
            assert bool(runs.events(run.id)) is (run.id == "open")
            assert runs.replay(run.id) == []
    assert path.stat().st_size < size / 2
    again = asyncio.run(ticket_lab.execute(tmp_path, run="b-7", expected={"source": "s-7", "title": "Title 7"}))
    assert (again["state"], again["events"], again["ticket"]["action"]["source"]) == ("succeeded", [], "s-7")
    assert "pruned" in again["certain"]


def test_a_settled_run_whose_write_may_still_land_is_not_pruned(tmp_path: Path) -> None:
    """A person's word does not end an operation that nobody can tell about; its history is the evidence."""
    asyncio.run(ticket_lab.execute(tmp_path, execute_write=True))
    with closing(Runs(tmp_path)) as runs, closing(sqlite3.connect(tmp_path / "runs.sqlite")) as file:
        file.execute("update runs set settled_by = 'ada', doubtful = 1")
        file.commit()
        assert runs.prune(time.time() + 1) == 0
        file.execute("update runs set doubtful = 0")
        file.commit()
        assert runs.prune(time.time() + 1) == 1


@pytest.mark.parametrize("age", ["30", "d", "-1d", "1.5d", "30 d", "٣d"])
def test_an_age_is_a_whole_number_and_a_unit(lab: Lab, age: str) -> None:
    """Anything else is refused and nothing is pruned."""
    with closing(Runs(lab.state_dir)):
        ended = lab.operate("prune", "--older-than", age)
    assert (ended.returncode, "--older-than" in ended.stderr) == (2, True)
    assert lab.operate("prune", "--older-than", "30d").returncode == 0


async def test_standard_input_is_read_to_its_end() -> None:
    """A file without a final line break loses no line."""
    assert [line async for line in batch.lines(io.StringIO("a\nb"))] == ["a\n", "b"]
    assert sys.stdin is not None
