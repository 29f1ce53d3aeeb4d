"""One durable call of a tool that nobody here wrote, by its recovery class; the world is the server's own file."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import GOAL, Lab
from forked import ROOT

pytestmark = pytest.mark.process

LOOK_UP = """look_up = { tool = "all_notes", found = "notes[?title == $args.title] | [0]", id = "number" }"""
TEXT = """\
[tools.notes.add.look_up]
tool = "text_notes"
reads = "text"
found = "contains(@, $args.title) && @"
fields = "{title: $args.title}"
"""
ADD = '[tools.notes.add]\nrecovery = "{}"\n'
RULES = """
[rules]
allow = ["mcp__notes", "mcp__tickets__create_*"]
"""
PUT = """\
[tools.notes.put]
recovery = "keyed"
key = "idempotency_key"
look_up = { tool = "all_notes", found = "notes[?key == $key] | [0]", id = "number" }
"""


class Place:
    """A folder with both files, a notes server with a fate, and a state folder."""

    def __init__(self, folder: Path, declared: str, fate: str = "") -> None:
        self.folder = folder
        self.file = folder / "notes.txt"
        self.declare(declared)
        self.serve(fate)

    def declare(self, declared: str) -> None:
        (self.folder / "harness.toml").write_text(declared + RULES)

    def serve(self, fate: str, **entry: Any) -> None:
        argv = [str(ROOT / "tests" / "notes_server.py"), str(self.file), fate]
        servers = {"notes": {"command": sys.executable, "args": argv} | entry}
        (self.folder / ".mcp.json").write_text(json.dumps({"mcpServers": servers}))

    def command(self, *words: str) -> tuple[int, str, str]:
        done = Lab(self.folder / "state").operate(*words)
        return done.returncode, done.stdout, done.stderr

    def call(self, *words: str, tool: str = "notes.add", title: str = "hello") -> dict[str, Any]:
        args = () if "--run" in words else (tool, "--args", json.dumps({"title": title}))
        code, out, err = self.command("call", *args, *words, "--config", str(self.folder), "--json")
        assert out, err
        return json.loads(out) | {"code": code}

    def titles(self) -> list[str]:
        if not self.file.exists():
            return []
        return [json.loads(line)["title"] for line in self.file.read_text().splitlines()]


def test_a_call_without_a_permit_writes_nothing_and_says_how_to_go_on(tmp_path: Path) -> None:
    """The printed command, typed as it is, does it; a third time it is only read."""
    place = Place(tmp_path, ADD.format("lookup") + LOOK_UP)
    first = place.call()
    assert (first["state"], first["code"], place.titles()) == ("waiting_execution", 0, [])
    words = first["next"]["command"].split()
    assert words[:4] == ["python", "-m", "miniharness", "call"]
    assert words[4:8] == ["--config", str(tmp_path), "--state-dir", str(tmp_path / "state")]
    code, out, err = place.command("call", *words[4:6], *words[8:], "--json")
    assert (code, json.loads(out)["state"], place.titles()) == (0, "succeeded", ["hello"]), err
    again = place.call("--execute")
    assert (again["run"], again["state"], again["attempts"]) == (first["run"], "succeeded", 1)
    assert place.titles() == ["hello"]


@pytest.mark.parametrize("fate", ["before", "after", "error", "lie"])
@pytest.mark.parametrize("look_up", [LOOK_UP, TEXT], ids=["structured", "text"])
def test_what_can_be_looked_up_is_never_written_twice(tmp_path: Path, fate: str, look_up: str) -> None:
    """T3: the server dies before or after the effect, denies it, or claims it: one note, or a person is asked.

    A server without a fence leaves one doubt: a write that is not there may still land.
    """
    place = Place(tmp_path, ADD.format("lookup") + look_up, fate)
    result = place.call("--execute")
    if fate in ("before", "lie"):
        assert (result["state"], result["code"], place.titles()) == ("reconcile_required", 3, [])
        assert "may still take effect" in result["reason"]
    else:
        assert (result["state"], result["code"], place.titles()) == ("succeeded", 0, ["hello"])
    assert result["attempts"] == 1


def test_after_the_settling_time_an_absent_is_final(tmp_path: Path) -> None:
    """The same command, an hour later, may write again; before that time it only looks."""
    place = Place(tmp_path, ADD.format("lookup") + LOOK_UP + "\nsettles_after = 3600", "before")
    first = place.call("--execute")
    assert (first["state"], first["next"]["action"], place.titles()) == ("reconcile_required", "wait", [])
    with sqlite3.connect(tmp_path / "state" / "runs.sqlite") as journal:
        journal.execute("update runs set ended_at = ended_at - 3600000")
    second = place.call("--execute")
    assert (second["state"], second["attempts"], place.titles()) == ("succeeded", 2, ["hello"])


@pytest.mark.parametrize("fate", ["before", "after"])
def test_a_keyed_write_is_sent_again_under_its_key(tmp_path: Path, fate: str) -> None:
    """The engine fills the key and the server de-duplicates: one note, whenever the server died."""
    place = Place(tmp_path, PUT, fate)
    result = place.call("--execute", tool="notes.put")
    assert (result["state"], place.titles()) == ("succeeded", ["hello"]), result
    assert result["attempts"] == (2 if fate == "before" else 1)


@pytest.mark.parametrize(("fate", "written"), [("", 1), ("before", 0), ("after", 1)])
def test_an_undeclared_tool_is_manual_and_is_sent_once(tmp_path: Path, fate: str, written: int) -> None:
    """Nobody can look: whatever it answered, a person settles it, and never a second write."""
    place = Place(tmp_path, "", fate)
    result = place.call("--execute")
    assert (result["state"], result["code"], len(place.titles())) == ("reconcile_required", 3, written)
    assert place.call("--execute")["attempts"] == 1
    code, out, _ = place.command("settle", result["run"], "--as", "succeeded", "--by", "me", "--why", "I looked")
    assert (code, "succeeded" in out, len(place.titles())) == (0, True, written)


def test_what_a_server_says_of_its_tools_never_widens_anything(tmp_path: Path) -> None:
    """T1: a tool that calls itself read-only and idempotent is asked about, sent once, and settled by a person."""
    place = Place(tmp_path, "", "before")
    (tmp_path / "harness.toml").write_text("")
    asked = place.call("--execute", tool="notes.harmless")
    assert (asked["code"], asked["next"]["action"], place.titles()) == (3, "approve", [])
    assert place.command("approve", asked["run"], "--by", "ann")[0] == 0
    result = place.call("--run", asked["run"])
    assert (result["state"], result["attempts"]) == ("reconcile_required", 1)


def test_an_idempotent_write_is_repeated_only_while_nobody_answered(tmp_path: Path) -> None:
    """It died before its answer: sent again. It answered: a person may settle it, for nobody can look."""
    place = Place(tmp_path, ADD.format("idempotent"), "before")
    result = place.call("--execute")
    assert (result["state"], result["attempts"], place.titles()) == ("reconcile_required", 2, ["hello"])
    assert result["reason"] == "the tool answered, and nobody can look up what is there"


def test_only_a_declared_error_is_a_clean_refusal(tmp_path: Path) -> None:
    """Undeclared it is unknown; declared, by code or message, the run fails with the tool's reason."""
    for number, clean in enumerate(("", 'clean_errors = ["quota"]', 'clean_errors = [{ message = "used up$" }]')):
        folder = tmp_path / str(number)
        folder.mkdir()
        place = Place(folder, f"{ADD.format('lookup')}{LOOK_UP}\n{clean}\n", "refuse")
        result = place.call("--execute")
        wanted = ("failed", "the tool refused the write: the quota is used up") if clean else ("reconcile_required",)
        assert (result["state"], result["reason"])[: len(wanted)] == wanted
        assert place.titles() == []


def test_a_write_that_took_too_long_is_unknown_and_cannot_land_later(tmp_path: Path) -> None:
    """T4: our own server is ended, another one is asked what is there, and nothing appears afterwards."""
    place = Place(tmp_path, ADD.format("lookup") + LOOK_UP + "\ntimeout = 1", "slow")
    result = place.call("--execute")
    assert (result["state"], result["attempts"]) == ("reconcile_required", 1)
    time.sleep(2.5)
    assert place.titles() == []


def test_the_goal_is_what_the_resource_is_compared_with(tmp_path: Path) -> None:
    """`--expect`, then `expect` of the declaration, then the arguments; what it does not name is not compared."""
    place = Place(tmp_path, ADD.format("lookup") + LOOK_UP)
    wrong = place.call("--execute", "--expect", '{"title": "hello", "tag": "urgent"}')
    assert (wrong["state"], wrong["code"]) == ("failed", 1)
    assert wrong["reason"] == 'the resource differs from the goal: tag is "", wanted "urgent"'
    place.declare(ADD.format("lookup") + LOOK_UP + '\nexpect = { title = "$args.title", tag = "" }')
    assert place.call("--execute", title="second")["state"] == "succeeded"


def test_arguments_are_checked_before_anything_is_opened(tmp_path: Path) -> None:
    """By the tool's own schema; the key belongs to the engine; each message names the field."""
    place = Place(tmp_path, PUT + ADD.format("lookup") + LOOK_UP)
    for args, told in (
        ('{"title": 7}', "$.title: 7 is not of type 'string'"),
        ("{}", "'title' is a required property"),
        ('{"titel": "x"}', "notes.add has no argument titel; it has: tag, title"),
        ("[]", "--args must be a JSON object"),
        ("{", "--args is not JSON"),
    ):
        code, out, err = place.command("call", "notes.add", "--args", args, "--config", str(tmp_path))
        assert (code, out, told in err) == (2, "", True), err
    words = ("call", "notes.put", "--args", '{"title": "t", "idempotency_key": "mine"}', "--config", str(tmp_path))
    code, _, err = place.command(*words)
    assert (code, "filled in by the engine" in err) == (2, True), err
    code, out, _ = place.command("runs", "--json")
    assert out == ""


def test_a_changed_tool_is_set_aside_until_it_is_accepted(tmp_path: Path) -> None:
    """T2: another description is shown, and nothing is sent before a person accepted it."""
    place = Place(tmp_path, ADD.format("lookup") + LOOK_UP)
    assert place.call()["state"] == "waiting_execution"
    with sqlite3.connect(tmp_path / "state" / "tools.sqlite") as pins:
        pins.execute("update pins set definition = replace(definition, 'Add a note', 'Add two notes')")
    result = place.call("--execute")
    assert (result["code"], result["interrupted"]["error"], place.titles()) == (75, "ToolUnavailable", [])
    assert result["interrupted"]["message"].endswith(f"accept --config {tmp_path} notes.add")
    code, out, _ = place.command("accept", "notes.add", "--config", str(tmp_path))
    assert (code, '+  "description": "Add a note."' in out) == (0, True), out
    assert place.call("--execute")["state"] == "succeeded"


def test_a_tool_that_only_reads_goes_straight(tmp_path: Path) -> None:
    """No run, no permit: the answer is printed."""
    place = Place(tmp_path, PUT + '[tools.notes.all_notes]\nrecovery = "read"\n')
    place.call("--execute", tool="notes.put")
    code, out, _ = place.command("call", "notes.all_notes", "--args", "{}", "--config", str(tmp_path))
    assert (code, [note["title"] for note in json.loads(out)["notes"]]) == (0, ["hello"])


def test_a_run_stays_with_its_server_and_its_arguments(tmp_path: Path) -> None:
    """Another command behind the same name, or other arguments, is another contract."""
    place = Place(tmp_path, ADD.format("lookup") + LOOK_UP)
    place.command("call", "notes.add", "--args", '{"title": "hello"}', "--run", "r-1", "--config", str(tmp_path))
    words = ("call", "notes.add", "--run", "r-1", "--config", str(tmp_path), "--execute")
    code, _, err = place.command(*words, "--args", '{"title": "other"}')
    assert (code, "arguments.title is 'hello', not 'other'" in err) == (2, True), err
    place.serve("", env={"A": "b"})
    code, _, err = place.command(*words)
    assert (code, "tool.server" in err, place.titles()) == (2, True, []), err


def test_the_ticket_server_is_driven_by_declaration_alone(tmp_path: Path) -> None:
    """Key, fence and clean errors: what the lab has in code, ten lines of TOML say, too."""
    declared = """\
[tools.tickets.create_review_ticket]
recovery = "keyed"
key = "operation_key"
fences = true
clean_errors = ["invalid", "conflict", "stale"]
resource = "ticket"
look_up = { tool = "lookup_review_ticket", arguments = { operation_key = "$key" }, found = "ticket", fields = "action" }
"""
    place = Place(tmp_path, declared)
    argv = [str(ROOT / "server.py"), "--db", str(tmp_path / "tickets.sqlite")]
    servers = {"tickets": {"command": sys.executable, "args": argv}}
    (tmp_path / ".mcp.json").write_text(json.dumps({"mcpServers": servers}))
    words = ("tickets.create_review_ticket", "--args", json.dumps(GOAL), "--execute", "--json")
    code, out, err = place.command("call", *words, "--config", str(tmp_path))
    result = json.loads(out)
    assert (code, result["state"], result["ticket"]["action"]) == (0, "succeeded", GOAL), err
    with sqlite3.connect(tmp_path / "tickets.sqlite") as tickets:
        assert tickets.execute("select op from tickets").fetchall() == [(f"{result['run']}:ticket",)]


def test_killed_wherever_a_call_is_it_ends_with_one_note(tmp_path: Path) -> None:
    """SIGKILL at random moments until there were ten: the same command goes on, and each note is written once."""
    place, lab = Place(tmp_path, PUT), Lab(tmp_path / "state")
    moments, kills, titles = random.Random(7), 0, []
    while kills < 10:
        titles.append(f"note {len(titles)}")
        args = json.dumps({"title": titles[-1]})
        words = ["notes.put", "--args", args, "--execute", "--dispatches", "50", "--config", str(tmp_path), "--json"]
        for _ in range(4):
            process = lab.start("call", *words, program=("-m", "miniharness"))
            time.sleep(moments.uniform(0.2, 0.8))
            kills += process.poll() is None
            process.kill()
            process.wait(10)
        result = json.loads(place.command("call", *words)[1])
        assert result["state"] == "succeeded"
        assert place.command("replay", result["run"])[0] == 0
    assert place.titles() == titles


@pytest.mark.parametrize(
    ("look_up", "told"),
    [
        ('look_up = { tool = "text_only", found = "[?title == $args.title] | [0]" }', "it has no structured content"),
        ('look_up = { tool = "all_notes", found = "nots[?title == $args.title]" }', "it has no field 'nots'"),
        ('look_up = { tool = "text_notes", reads = "text", found = "notes" }', "it has no field 'notes'"),
        ('look_up = { tool = "text_notes", reads = "json" }', "breaks its schema"),
        ('look_up = { tool = "all_notes", found = "notes[0]", fields = "title" }', "fields are no object"),
        (
            'look_up = { tool = "all_notes", found = "length(notes[?title == `x`])", fields = "{title: $args.title}" }',
            "gives the number 0",
        ),
    ],
)
def test_a_look_up_that_cannot_be_read_is_never_taken_for_absent(tmp_path: Path, look_up: str, told: str) -> None:
    """Before the first write: nothing is decided, and the reason says what is wrong with the declaration."""
    place = Place(tmp_path, f"{ADD.format('lookup')}{look_up}\nsettles_after = 0\n")
    place.file.write_text('{"title": "older", "tag": "", "key": ""}\n')
    for _ in range(2):
        result = place.call("--execute")
        assert (result["code"], result["attempts"], place.titles()) == (75, 0, ["older"])
        assert told in result["interrupted"]["message"]


ONE = """\
[tools.notes.add.look_up]
tool = "one_note"
arguments = { title = "$args.title" }
id = "number"
"""
ROWS = """\
[tools.notes.add.look_up]
tool = "text_notes"
reads = "text"
rows = '(?m)^(?P<number>\\d+): (?P<title>.*)$'
found = "[?title == $args.title] | [0]"
id = "number"
"""


def test_an_error_means_absent_only_where_it_is_declared_so(tmp_path: Path) -> None:
    """Many servers report what is not there as an error; any other error still decides nothing."""
    place = Place(tmp_path, ADD.format("lookup") + ONE)
    undeclared = place.call("--execute")
    assert (undeclared["code"], undeclared["attempts"], place.titles()) == (75, 0, [])
    place.declare(ADD.format("lookup") + ONE + 'absent = [{ message = "there is no note" }]')
    (tmp_path / "locked").touch()
    other = place.call("--execute")
    assert (other["code"], other["attempts"], "the notes are locked" in other["interrupted"]["message"]) == (
        75,
        0,
        True,
    )
    (tmp_path / "locked").unlink()
    assert place.call("--execute")["state"] == "succeeded"
    assert place.titles() == ["hello"]


def test_a_text_is_read_as_rows(tmp_path: Path) -> None:
    """By a regular expression with named groups, so that a title that only begins alike is another one."""
    place = Place(tmp_path, ADD.format("lookup") + ROWS)
    place.file.write_text('{"title": "hello world", "tag": "", "key": ""}\n')
    result = place.call("--execute")
    assert (result["state"], result["resource"]["id"], place.titles()) == ("succeeded", "2", ["hello world", "hello"])


def test_a_text_that_is_no_answer_is_never_taken_for_an_absence(tmp_path: Path) -> None:
    """Some servers report an error as an ordinary text; `valid` says what an answer looks like."""
    place = Place(tmp_path, ADD.format("lookup") + ROWS + "valid = '^([0-9]+: |$)'\n")
    (tmp_path / "locked").touch()
    result = place.call("--execute")
    assert (result["code"], result["attempts"], place.titles()) == (75, 0, [])
    assert "its text does not match `valid`" in result["interrupted"]["message"]
    (tmp_path / "locked").unlink()
    assert (place.call("--execute")["state"], place.titles()) == ("succeeded", ["hello"])


def test_an_argument_that_the_tool_does_not_have_is_no_reference(tmp_path: Path) -> None:
    """A typo in the declaration is told before anything is opened."""
    place = Place(tmp_path, ADD.format("lookup") + LOOK_UP.replace("$args.title", "$args.titel"))
    code, _, err = place.command(
        "call", "notes.add", "--args", '{"title": "x"}', "--execute", "--config", str(tmp_path)
    )
    assert (code, "$args.titel is no argument of notes.add" in err, place.titles()) == (2, True, [])


def test_what_only_a_person_can_settle_names_both_verdicts(tmp_path: Path) -> None:
    """The text says to look first."""
    place = Place(tmp_path, "", "before")
    words = ("call", "notes.add", "--args", '{"title": "hello"}', "--execute", "--config", str(tmp_path))
    code, out, _ = place.command(*words)
    assert (code, "look      for yourself" in out) == (3, True)
    assert ("--as succeeded" in out, "--as failed" in out) == (True, True)


def test_an_interrupted_call_says_where_it_is(tmp_path: Path) -> None:
    """Ctrl-C while the write is under way: state and next command; the same command goes on."""
    place = Place(tmp_path, ADD.format("lookup") + LOOK_UP, "slow")
    words = ["call", "notes.add", "--args", '{"title": "hello"}', "--execute", "--config", str(tmp_path), "--json"]
    process = Lab(tmp_path / "state").start(*words, program=("-m", "miniharness"))
    give_up = time.monotonic() + 30
    while not (tmp_path / "met").exists() and time.monotonic() < give_up:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    told = json.loads(out)
    assert (process.returncode, told["state"], told["interrupted"]["error"]) == (75, "dispatching", "Interrupted")
    assert told["next"]["command"].endswith(f"--run {told['run']} --execute")
    time.sleep(2.5)  # whatever can still land has landed
    result = place.call("--execute")
    wanted = {"succeeded": ["hello"], "reconcile_required": []}[result["state"]]
    assert (result["attempts"], place.titles()) == (1, wanted)


LIMITS = '[tools.notes.all_notes]\nrecovery = "read"\n[limits]\ncalls_per_run = 3\n'


def test_a_read_that_only_repeats_the_last_call_is_denied(tmp_path: Path) -> None:
    """Within an agent's run; a write in between makes it a new question, and the run has so many calls."""
    place = Place(tmp_path, PUT + LIMITS)

    def ask(*words: str) -> tuple[int, str]:
        code, _, err = place.command(
            "call", *words, "--within", "agent-1", "--execute", "--config", str(tmp_path), "--json"
        )
        return code, err

    read, write = ("notes.all_notes", "--args", "{}"), ("notes.put", "--args", '{"title": "hello"}')
    assert ask(*read)[0] == 0
    code, err = ask(*read)
    assert (code, "this very call was just made" in err) == (1, True)
    assert [ask(*write)[0], ask(*write)[0], ask(*read)[0]] == [0, 0, 0]
    code, err = ask("notes.put", "--args", '{"title": "other"}')
    code, out, _ = place.command(
        "call", "notes.put", "--args", '{"title": "b"}', "--within", "agent-1", "--config", str(tmp_path)
    )
    assert (code, "all of its 3 calls" in out, place.titles()) == (1, True, ["hello"])
    for _ in range(2):
        assert place.command("call", *read, "--config", str(tmp_path))[0] == 0


def test_a_read_that_failed_may_be_made_again_once(tmp_path: Path) -> None:
    """Three times the same failure would tell nothing new."""
    place = Place(tmp_path, '[tools.notes.hang]\nrecovery = "read"\ntimeout = 0.5\n')
    codes = [
        place.command("call", "notes.hang", "--args", "{}", "--within", "a", "--config", str(tmp_path))[0]
        for _ in range(3)
    ]
    assert codes == [75, 75, 1]


def test_each_call_can_be_an_operation_of_its_own(tmp_path: Path) -> None:
    """Then it needs a name, and equal arguments write twice."""
    place = Place(tmp_path, PUT + 'operation = "call"\n')
    code, _, err = place.command(
        "call", "notes.put", "--args", '{"title": "a"}', "--execute", "--config", str(tmp_path)
    )
    assert (code, "give it a name with --run ID" in err) == (2, True)
    for run in ("one", "two", "two"):
        words = ("call", "notes.put", "--args", '{"title": "a"}', "--run", run, "--execute", "--config", str(tmp_path))
        assert place.command(*words)[0] == 0
    assert place.titles() == ["a", "a"]


def test_what_a_tool_says_of_its_error_in_plain_text_is_evidence(tmp_path: Path) -> None:
    """And can be declared clean like a structured one."""
    declared = f'[tools.notes.grumble]\nrecovery = "lookup"\n{LOOK_UP}\n'
    place = Place(tmp_path, declared)
    unknown = place.call("--execute", tool="notes.grumble")
    assert (unknown["state"], unknown["attempts"]) == ("reconcile_required", 1)
    assert "the disk is full" in json.dumps(unknown["events"])
    place.declare(declared + 'clean_errors = [{ message = "disk is full" }]\n')
    clean = place.call("--execute", tool="notes.grumble", title="other")
    assert (clean["state"], "other: the disk is full" in clean["reason"]) == ("failed", True)
