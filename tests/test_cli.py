"""The operator's command, on runs made by the lab with the real server in the same process."""

from __future__ import annotations

import asyncio
import json
import shlex
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Lab, tickets

import lab
import server
from miniharness import cli, faults
from miniharness.contract import Budget
from miniharness.engine import Answer, Json
from miniharness.machine import Outcome
from miniharness.mcp.session import Session
from miniharness.mcp.wire import Limits
from store import Tickets

Operate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder whose ticket server runs in this process."""
    path = tmp_path / "state"
    path.mkdir()
    store = Tickets(path / "tickets.sqlite")
    monkeypatch.setattr(lab, "session_for", lambda *_: Session(lambda: server.build(store), None, Limits(), "legacy"))
    yield path
    store.close()


@pytest.fixture
def operate(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Operate:
    """Run `miniharness --state-dir folder ...` and return its exit code, output and errors."""

    def run(*args: str, state_dir: Path | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["miniharness", "--state-dir", str(state_dir or folder), *args])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run


def execute(folder: Path, **kwargs: Any) -> dict[str, Any]:
    return asyncio.run(lab.execute(folder, **kwargs))


def spent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose two dispatches got lost on the way."""

    async def lose(self: object, key: str, action: Json, epoch: int) -> Answer:
        return Answer(Outcome.UNKNOWN, "lost on the way")

    with monkeypatch.context() as patch:
        patch.setattr(faults.FaultyTool, "dispatch", lose)
        result = execute(folder, execute_write=True, budget=Budget(dispatches=2))
    assert (result["state"], result["next"]["action"]) == ("reconcile_required", "ask_operator")


def typed(command: str) -> list[str]:
    """The arguments of a `python -m miniharness --state-dir D ...` command that a message told."""
    words = shlex.split(command)
    assert words[:4] == ["python", "-m", "miniharness", "--state-dir"]
    return words[5:]


def test_runs_lists_each_run_with_its_state_and_next_command(folder: Path, operate: Operate) -> None:
    """`runs` shows every run, `--state` some of them, and `--json` one object a line."""
    execute(folder)
    execute(folder, run="other", execute_write=True)
    _, table, _ = operate("runs")
    assert "review-001" in table
    assert "--run review-001 --execute" in table
    code, lines, _ = operate("runs", "--state", "succeeded", "--json")
    assert [json.loads(line)["run"] for line in lines.splitlines()] == ["other"]
    assert code == 0


def test_show_and_replay_tell_what_is_certain_and_prove_it(folder: Path, operate: Operate) -> None:
    """`show` gives the state, the certainty and the timeline; `replay` folds them again and names the head."""
    result = execute(folder, execute_write=True)
    code, shown, _ = operate("show", "review-001")
    assert code == 0
    assert "the resource was looked up and equals the goal" in shown
    assert all(event["type"] in shown for event in result["events"])
    assert json.loads(operate("show", "review-001", "--json")[1]) == result
    code, proof, _ = operate(*typed(result["next"]["command"]))
    assert (code, "they give the stored row: succeeded" in proof) == (0, True)


def test_replay_finds_an_altered_history(folder: Path, operate: Operate) -> None:
    """Who changes an event breaks the chain, and `replay` says where and exits 1."""
    execute(folder, execute_write=True)
    with sqlite3.connect(folder / "runs.sqlite") as connection:
        connection.execute("update events set detail = '{\"request\":2}' where seq = 2")
    connection.close()
    code, told, _ = operate("replay", "review-001")
    assert (code, "event 2 (model_requested) was altered" in told) == (1, True)


def test_cancel_is_a_request_that_looks_up_first(folder: Path, operate: Operate) -> None:
    """`cancel` only records; the next command looks up and then cancels, and writes nothing although it may."""
    execute(folder)
    code, told, _ = operate("cancel", "review-001")
    assert (code, "next: python lab.py" in told) == (0, True)
    result = execute(folder, execute_write=True)
    assert (result["state"], result["events"][-1]["type"], tickets(folder)) == ("cancelled", "looked_up", [])


def test_a_cancel_after_the_write_still_gives_the_verdict(folder: Path, operate: Operate) -> None:
    """A resource that is there is not `cancelled`: the run succeeded."""
    execute(folder)
    store = Tickets(folder / "tickets.sqlite")
    store.create("review-001:ticket", lab.GOAL, epoch=99)
    store.close()
    operate("cancel", "review-001")
    assert execute(folder)["state"] == "succeeded"


def test_grant_is_recorded_and_used_only_after_a_look_up(
    folder: Path, operate: Operate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The told `grant` command works as typed, is in the history with who and why, and the next run looks up first."""
    spent(folder, monkeypatch)
    code, told, _ = operate(*typed(execute(folder)["next"]["command"]))
    assert (code, "--execute" in told) == (0, True)
    result = execute(folder, execute_write=True)
    kinds = [event["type"] for event in result["events"]]
    granted = kinds.index("granted")
    assert result["events"][granted]["detail"] == {"by": "NAME", "dispatches": 1, "why": "REASON"}
    assert kinds.index("looked_up", granted) < kinds.index("dispatch_intended", granted)
    assert (result["state"], result["attempts"], len(tickets(folder))) == ("succeeded", 3, 1)


def test_settle_ends_a_run_by_a_persons_word_for_ever(
    folder: Path, operate: Operate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A settled run says in each report whose word it was and that no check confirmed it."""
    spent(folder, monkeypatch)
    code, _, _ = operate("settle", "review-001", "--as", "succeeded", "--by", "ada", "--why", "seen by hand")
    assert code == 0
    result = execute(folder)
    assert (result["state"], result["reason"]) == (
        "succeeded",
        "settled as succeeded by ada, not by a check: seen by hand",
    )
    assert result["certain"] == "ada ended this run by their word; no check confirmed it"
    assert "replay" in result["next"]["command"]


@pytest.mark.parametrize("command", [("settle", "--as", "failed"), ("grant", "--dispatches", "1"), ("cancel",)])
def test_a_decision_that_the_state_forbids_changes_nothing(
    folder: Path, operate: Operate, command: tuple[str, ...]
) -> None:
    """A finished run takes no decision; the refusal says so, names the next command and leaves the row alone."""
    before = execute(folder, execute_write=True)
    word = () if command == ("cancel",) else ("--by", "ada", "--why", "because")
    code, _, err = operate(command[0], "review-001", *command[1:], *word)
    assert (code, "is not possible" in err, "next: " in err) == (2, True, True)
    assert execute(folder) == before


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("show", "nobody"), "there is no run 'nobody'"),
        (("grant", "review-001", "--dispatches", "1", "--by", " ", "--why", "x"), "--by is empty"),
        (("grant", "review-001", "--dispatches", "1", "--by", "a", "--why", "b\nc"), "--why holds a control character"),
    ],
)
def test_bad_input_names_the_field_and_the_rule(folder: Path, operate: Operate, args: Any, told: str) -> None:
    """A wrong command exits 2 and says what is wrong; nothing is recorded."""
    before = execute(folder)
    code, _, err = operate(*args)
    assert (code, told in err) == (2, True)
    after = execute(folder)
    assert [e["type"] for e in after["events"]].count("granted") == 0
    assert before["state"] == after["state"]


def test_a_folder_without_a_journal_is_refused_and_not_made(tmp_path: Path, operate: Operate) -> None:
    """An operator's command never makes a journal."""
    code, _, err = operate("runs", state_dir=tmp_path / "nowhere")
    assert (code, "holds no runs.sqlite" in err, (tmp_path / "nowhere").exists()) == (2, True, False)


def test_doctor_names_damage_and_runs_that_need_a_person(
    folder: Path, operate: Operate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor` exits 0 when all is well, 3 when a run needs a person, and 1 when a file is damaged."""
    execute(folder, run="fine", execute_write=True)
    assert operate("doctor")[0] == 0
    spent(folder, monkeypatch)
    code, told, _ = operate("doctor")
    assert (code, "needs a person" in told, "grant" in told) == (3, True, True)
    (folder / "runs.sqlite").write_bytes(b"not a database at all" * 300)
    code, told, _ = operate("doctor")
    assert (code, "not a database" in told) == (1, True)


@pytest.mark.process
def test_the_demo_shows_two_rows_there_and_one_here(lab: Lab) -> None:
    """`miniharness demo` kills the tool process for real in both worlds and exits 0 only on the contrast."""
    done = lab.operate("demo")
    assert "= 2 rows for one order" in done.stdout
    assert "= 1 row for one order" in done.stdout
    assert done.returncode == 0
