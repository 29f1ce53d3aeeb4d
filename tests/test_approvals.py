"""Approvals: asked where nobody can answer, given from another terminal, bound to one exact write, used once."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from test_calls import ADD, LOOK_UP, PUT, Place

pytestmark = pytest.mark.process

ASKED = '[rules]\nask = ["mcp__notes"]\n'


class Asked(Place):
    """A place where writes have to be approved."""

    def declare(self, declared: str, rules: str = ASKED) -> None:
        (self.folder / "harness.toml").write_text(declared + "\n" + rules)

    def approve(self, run: str) -> str:
        code, out, err = self.command("approve", run, "--by", "ann")
        assert code == 0, err
        return out

    def history(self, run: str) -> list[dict[str, Any]]:
        code, out, err = self.command("show", run, "--json")
        assert code == 0, err
        return json.loads(out)["events"]


@pytest.fixture
def place(tmp_path: Path) -> Asked:
    return Asked(tmp_path, ADD.format("lookup") + LOOK_UP)


def test_without_a_terminal_ask_is_no_at_once_and_says_how_to_say_yes(place: Asked) -> None:
    """T14: exit code 3, the command that approves, and the very bytes that will be sent."""
    result = place.call("--execute")
    assert (result["code"], result["state"], place.titles()) == (3, "waiting_execution", [])
    assert result["interrupted"]["error"] == "ApprovalNeeded"
    assert result["next"]["action"] == "approve"
    code, out, _ = place.command("approvals")
    assert (code, result["run"] in out, '"title": "hello"' in out, "ask mcp__notes" in out) == (0, True, True, True)
    words = result["next"]["command"].replace("NAME", "ann").split()
    assert words[:5] == ["python", "-m", "miniharness", "--state-dir", str(place.folder / "state")]
    assert place.command(*words[5:])[0] == 0
    assert place.command("approvals")[1] == ""
    done = place.call("--run", result["run"])
    assert (done["code"], done["state"], done["attempts"], place.titles()) == (0, "succeeded", 1, ["hello"])


def test_who_approved_what_and_from_where_stands_in_the_history(place: Asked) -> None:
    """With the shown text; and the history proves itself."""
    run = place.call("--execute")["run"]
    shown = place.approve(run)
    place.call("--run", run)
    events = {event["type"]: event["detail"] for event in place.history(run)}
    assert events["approval_asked"]["shown"] in shown
    assert events["approval_asked"]["bound"]["tool"] == "notes.add"
    assert (events["approved"]["by"], "process" in events["approved"]["from"]) == ("ann", True)
    code, out, _ = place.command("replay", run)
    assert (code, "the chain is whole" in out) == (0, True)


def test_an_approval_is_used_once(tmp_path: Path) -> None:
    """The server died before the write: sending it again needs another yes."""
    place = Asked(tmp_path, PUT, "before")
    run = place.call("--execute", tool="notes.put")["run"]
    place.approve(run)
    first = place.call("--run", run)
    assert (first["state"], first["attempts"], place.titles()) == ("waiting_execution", 1, [])
    assert place.call("--run", run, "--execute")["code"] == 3
    place.approve(run)
    done = place.call("--run", run)
    assert (done["state"], done["attempts"], place.titles()) == ("succeeded", 2, ["hello"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ('[rules]\nask = ["mcp__notes", "mcp__other"]\n', "has changed"),
        ('[rules]\ndeny = ["mcp__notes__add"]\n', "deny mcp__notes__add"),
    ],
)
def test_a_changed_rule_voids_an_approval(place: Asked, change: str, told: str) -> None:
    """T9: the rules of the moment count; a new deny wins."""
    run = place.call("--execute")["run"]
    place.approve(run)
    place.declare(ADD.format("lookup") + LOOK_UP, change)
    result = place.call("--run", run, "--execute")
    assert (result["state"], place.titles()) == ("waiting_execution", [])
    assert result["code"] == (1 if "deny" in change else 3)
    assert told in json.dumps([result["interrupted"], result["events"]])


def test_a_changed_tool_voids_an_approval(place: Asked) -> None:
    """T7: what was approved is what the server said it does."""
    run = place.call("--execute")["run"]
    place.approve(run)
    with sqlite3.connect(place.folder / "state" / "tools.sqlite") as pins:
        pins.execute("update pins set definition = replace(definition, 'Add a note', 'Add two')")
    assert place.call("--run", run)["code"] == 75
    place.command("accept", "notes.add", "--config", str(place.folder))
    assert place.call("--run", run)["state"] == "succeeded"  # as it was when it was approved


def test_an_expired_approval_counts_no_more(place: Asked) -> None:
    """Its question is asked again."""
    run = place.call("--execute")["run"]
    place.approve(run)
    later = "update runs set approval = json_set(approval, '$.expires_at', 1.0)"
    with sqlite3.connect(place.folder / "state" / "runs.sqlite") as journal:
        journal.execute(later)
    result = place.call("--run", run, "--execute")
    assert (result["code"], place.titles()) == (3, [])
    assert "the approval has expired" in json.dumps(result["events"])


def test_a_no_cancels_the_run_after_a_look(place: Asked) -> None:
    """With who said it and why; nothing is written."""
    run = place.call("--execute")["run"]
    code, _, err = place.command("deny", run, "--by", "ann", "--why", "not today")
    assert code == 0, err
    result = place.call("--run", run, "--execute")
    assert (result["state"], result["code"], place.titles()) == ("cancelled", 1, [])
    assert {"by": "ann", "why": "not today"} in [event["detail"] for event in result["events"]]


def test_what_is_not_asked_cannot_be_approved(place: Asked) -> None:
    """The message names the next command."""
    run = place.call()["run"]
    code, _, err = place.command("approve", run, "--by", "ann")
    assert (code, "asks for no approval; next: " in err) == (2, True)


def test_a_denied_call_opens_nothing(place: Asked) -> None:
    """And says which rule denies it."""
    place.declare(ADD.format("lookup") + LOOK_UP, '[rules]\ndeny = ["mcp__notes__add"]\n')
    result = place.call("--execute")
    assert (result["code"], result["state"], result["interrupted"]["error"]) == (1, None, "Denied")
    assert "harness.toml" in result["interrupted"]["message"]


def test_an_invisible_character_is_shown(place: Asked) -> None:
    """What is approved is what is seen: text that turns the line around is escaped."""
    place.call("--execute", title="pay \u202e 001")
    assert "\\u202e" in place.command("approvals")[1]
