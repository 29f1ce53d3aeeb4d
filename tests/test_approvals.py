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


def test_an_approval_of_one_call_covers_no_other(place: Asked) -> None:
    """T8: also when both have the very same arguments."""
    words = ("notes.add", "--args", '{"title": "hello"}', "--execute", "--config", str(place.folder))
    assert [place.command("call", *words, "--run", run)[0] for run in ("one", "two")] == [3, 3]
    place.approve("one")
    assert place.call("--run", "two")["next"]["action"] == "approve"
    assert (place.call("--run", "one")["state"], place.titles()) == ("succeeded", ["hello"])


FILES = """\
[tools.notes.add]
recovery = "lookup"
paths = { title = "edit" }
look_up = { tool = "all_notes", found = "notes[?title == $args.title] | [0]", id = "number" }
"""


def within(place: Asked, title: str, run: str = "agent-1") -> dict[str, Any]:
    return place.call("--within", run, "--execute", title=title)


def test_trust_is_for_one_tool_within_one_run_and_these_files(place: Asked) -> None:
    """A yes for the session lets calls like it through, each with its own approval; anything else is asked about."""
    place.declare(FILES, ASKED + 'deny = ["mcp__notes__add(title:*secret*)"]')
    first = within(place, "src/a")
    assert (first["code"], first["run"].startswith("agent-1.")) == (3, True)
    pattern = f"/{place.folder}/src/**"
    code, out, err = place.command("approve", first["run"], "--by", "ann", "--for-session", "--paths", pattern)
    assert (code, "ann trusts calls of notes.add on files within" in out) == (0, True), err
    place.file.write_text("")
    inside = str(place.folder / "src" / "b")
    done = within(place, inside)
    assert (done["state"], place.titles()) == ("succeeded", [inside])
    events = {event["type"]: event["detail"] for event in place.history(done["run"])}
    assert events["approved"]["by"] == "ann, for all such calls within this run"
    for title, run in ((str(place.folder / "doc"), "agent-1"), (inside + "2", "agent-2")):
        assert (within(place, title, run)["code"], place.titles()) == (3, [inside])
    denied = within(place, str(place.folder / "src" / "secret"))
    assert (denied["interrupted"]["error"], place.titles()) == ("Denied", [inside])
    code, out, _ = place.command("trust", "--json")
    told = json.loads(out)
    assert (told["within"], told["tool"], told["by"], told["paths"]) == ("agent-1", "notes.add", "ann", [pattern])


@pytest.mark.parametrize("change", ["server", "destructive"])
def test_trust_ends_where_the_tool_is_another(place: Asked, change: str) -> None:
    """Another server behind the name, or a tool that is declared destructive, is asked about again."""
    run = within(place, "a")["run"]
    assert place.command("approve", run, "--by", "ann", "--for-session")[0] == 0
    assert within(place, "b")["state"] == "succeeded"
    if change == "server":
        place.serve("", env={"CHANGED": "1"})
    else:
        place.declare(ADD.format("lookup") + 'risk = "destructive"\n' + LOOK_UP)
    assert (within(place, "c")["code"], place.titles()) == (3, ["b"])


def test_trust_needs_an_agents_run(place: Asked) -> None:
    """There is no trust that is not within one."""
    run = place.call("--execute")["run"]
    code, _, err = place.command("approve", run, "--by", "ann", "--for-session")
    assert (code, "within an agent's run" in err) == (2, True)
    code, _, err = place.command("approve", run, "--by", "ann", "--paths", "src/**")
    assert (code, "--paths limits --for-session" in err) == (2, True)


def test_only_who_is_named_may_answer(place: Asked) -> None:
    """And a change of who it is voids the question."""
    place.declare(ADD.format("lookup") + LOOK_UP, ASKED + '[approvals]\nby = ["ben"]\n')
    run = place.call("--execute")["run"]
    code, _, err = place.command("approve", run, "--by", "ann")
    assert (code, "lets only ben approve" in err) == (2, True)
    place.declare(ADD.format("lookup") + LOOK_UP, ASKED + '[approvals]\nby = ["ann"]\n')
    again = place.call("--run", run)
    assert (again["code"], "answered_by" in again["interrupted"]["message"]) == (3, True)
    place.approve(run)
    assert place.call("--run", run)["state"] == "succeeded"


def test_what_changed_since_the_approval_is_told(place: Asked) -> None:
    """Also by a command without the permit, for the approval would have been it."""
    run = place.call("--execute")["run"]
    place.approve(run)
    place.declare(ADD.format("lookup") + LOOK_UP, ASKED + 'deny = ["mcp__other"]\n')
    told = place.call("--run", run)
    assert (told["code"], told["next"]["action"], place.titles()) == (3, "approve", [])
    assert told["interrupted"]["message"].endswith("what the approval was bound to has changed: policy")


def test_doctor_names_what_waits_for_a_person_or_for_time(tmp_path: Path) -> None:
    """An approval, and a settling time."""
    place = Asked(tmp_path, ADD.format("lookup") + LOOK_UP + "\nsettles_after = 3600")
    asked = place.call("--execute")["run"]
    place.declare(ADD.format("lookup") + LOOK_UP + "\nsettles_after = 3600", '[rules]\nallow = ["mcp__notes"]')
    place.serve("before")
    waits = place.call("--execute", title="other")
    assert (waits["next"]["action"], waits["next"]["until"] > "2026") == ("wait", True)
    code, out, err = place.command("doctor")
    assert (code, err) == (3, "")
    assert asked in out
    assert "needs a person" in out
    assert "waits until nothing can land any more" in out
