"""A tool's recovery is graded by trying it on a real server, which is written to, killed, frozen and restarted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import Lab
from forked import ROOT
from test_calls import ADD, LOOK_UP, PUT

pytestmark = pytest.mark.process

TICKET = """\
[tools.tickets.create_review_ticket]
recovery = "keyed"
key = "operation_key"
fences = true
look_up = { tool = "lookup_review_ticket", arguments = { operation_key = "$key" }, found = "ticket", fields = "action" }
clean_errors = ["invalid", "conflict", "stale"]
resource = "ticket"
"""
SHELF = """\
[tools.shelf.put]
recovery = "keyed"
key = "key"
fences = true
look_up = { tool = "items", found = "items[?key == $key] | [0]", id = "title" }
timeout = 5.0
"""
SET = """\
[tools.shelf.set]
recovery = "idempotent"
look_up = { tool = "items", found = "items[?title == $args.title] | [0]", id = "title" }
"""
COUNT = '{ tool = "all_notes", found = "length(notes[?title == $args.title])" }'


class Scratch:
    """A folder with both files, the servers of the tests over scratch data, and the command."""

    def __init__(self, folder: Path, declared: str, *switches: str, **servers: Any) -> None:
        self.folder = folder
        programs = {
            "tickets": [str(ROOT / "server.py"), "--db", str(folder / "tickets.sqlite")],
            "notes": [str(ROOT / "tests" / "notes_server.py"), str(folder / "notes.txt")],
            "shelf": [str(ROOT / "tests" / "shelf_server.py"), str(folder / "shelf.json"), *switches],
        }
        entries = {name: {"command": sys.executable, "args": argv} for name, argv in programs.items()}
        (folder / ".mcp.json").write_text(json.dumps({"mcpServers": entries | servers}))
        (folder / "harness.toml").write_text(declared)

    def command(self, *words: str) -> tuple[int, str, str]:
        done = Lab(self.folder / "state").operate("probe", *words, "--config", str(self.folder))
        return done.returncode, done.stdout, done.stderr

    def probe(self, tool: str, *words: str, **arguments: str) -> dict[str, Any]:
        args = json.dumps(arguments or {"title": "probe"})
        code, out, err = self.command(tool, "--args", args, "--scratch", "--json", *words)
        assert out, err
        return json.loads(out) | {"code": code}


def saw(told: dict[str, Any], name: str) -> str:
    return next(experiment["saw"] for experiment in told["experiments"] if experiment["name"] == name)


@pytest.mark.parametrize(
    ("tool", "declared", "arguments", "grade"),
    [
        ("tickets.create_review_ticket", TICKET, {"source": "s", "title": "t"}, "A"),
        ("notes.put", PUT, {"title": "probe"}, "B"),
        ("notes.add", ADD.format("lookup") + LOOK_UP, {"title": "probe"}, "C"),
        ("shelf.set", SET, {"title": "probe", "status": "open"}, "D"),
    ],
)
def test_a_right_declaration_is_confirmed(
    tmp_path: Path, tool: str, declared: str, arguments: dict[str, str], grade: str
) -> None:
    """Each kind of server gets its grade, with the very lines that are declared; nothing contradicts them."""
    told = Scratch(tmp_path, declared).probe(tool, **arguments)
    assert (told["grade"], told["contradictions"], told["unproven"], told["code"]) == (grade, [], [], 0), told
    assert tomllib.loads(told["harness_toml"]) == tomllib.loads(declared)
    assert told["shown"]["conflict"] is {"A": True, "B": False}.get(grade), "notes.put ignores other content"
    assert "there 0 of" not in saw(told, "kill"), "killed after the answer, it is there"
    assert "there 4 of" not in saw(told, "kill"), "killed before it read the request, it is not"


def test_a_repeat_that_duplicates_with_no_look_up_is_f(tmp_path: Path) -> None:
    """`--count` sees the second effect; nobody could tell what became of a write, so a person has to."""
    told = Scratch(tmp_path, "").probe("notes.add", "--count", COUNT)
    assert (told["grade"], told["code"], told["shown"]["repeat"]) == ("F", 1, False), told
    assert told["harness_toml"] == '[tools.notes.add]\nrecovery = "manual"'
    assert "counted 2" in saw(told, "repeat")


def test_what_is_not_declared_yet_can_be_given_with_the_command(tmp_path: Path) -> None:
    """Key and look-up on the command line; the report has them as lines for harness.toml."""
    query = '{ tool = "items", found = "items[?key == $key] | [0]", id = "title" }'
    scratch = Scratch(tmp_path, "", "keyed", "conflict", "fence")
    told = scratch.probe("shelf.put", "--key", "key", "--lookup", query)
    assert (told["grade"], told["code"]) == ("A", 0), told
    assert tomllib.loads(told["harness_toml"]) == tomllib.loads(SHELF.replace("timeout = 5.0\n", ""))


@pytest.mark.parametrize(
    ("switches", "grade", "denied", "seen"),
    [
        (("keyed", "conflict"), "B", "declared fences = true, but not so", "late write"),
        (("fence",), "C", 'declared recovery = "keyed", but not so: a repeat adds nothing', "counted 2"),
        (("keyed", "conflict", "fence", "forgets"), "C", "declared fences = true, but not so", "freeze"),
        (("keyed", "fence", "lies"), "F", "declared look_up, but not so", "it does not find what was written"),
        (("lags",), "F", "declared look_up, but not so", "it does not find what was written"),
    ],
    ids=["no fence", "not keyed", "remembers in one process only", "a look-up that lies", "a write that lands later"],
)
def test_a_wrong_declaration_is_named_with_what_was_seen(
    tmp_path: Path, switches: tuple[str, ...], grade: str, denied: str, seen: str
) -> None:
    """Exit code 1, and each line of harness.toml that is not so, with the experiment that shows it."""
    told = Scratch(tmp_path, SHELF, *switches).probe("shelf.put")
    assert (told["grade"], told["code"]) == (grade, 1), told
    assert any(said.startswith(denied) and seen in said for said in told["contradictions"]), told["contradictions"]
    assert all(stated in switches for stated in ("keyed", "fence") if told["shown"][stated])


def test_keys_in_memory_do_not_survive_a_restart(tmp_path: Path) -> None:
    """The repeat within one process adds nothing; after the restart it does, and that counts."""
    told = Scratch(tmp_path, SHELF, "keyed", "conflict", "fence", "forgets").probe("shelf.put")
    verdicts = {e["name"]: e["shows"].get("repeat") for e in told["experiments"]}
    assert (verdicts["repeat"], verdicts["restart"], told["shown"]["repeat"]) == (True, False, False), told


def test_a_server_that_suffers_no_other_beside_it_is_graded_by_the_rest(tmp_path: Path) -> None:
    """Nobody can look while it is frozen, so the freeze shows nothing; that is no fault of its look-up."""
    told = Scratch(tmp_path, SHELF, "keyed", "conflict", "fence", "alone").probe("shelf.put")
    assert (told["grade"], told["contradictions"]) == ("A", []), told
    assert saw(told, "freeze").startswith("no second server starts beside it")


def test_a_look_up_that_contradicts_the_count_is_not_true(tmp_path: Path) -> None:
    """It says absent, an independent query counts one: the look-up lies, whatever else is right."""
    declared = SHELF.replace('"items[?key == $key] | [0]"', '"items[?key == $key && status == `open`] | [0]"')
    scratch = Scratch(tmp_path, declared, "keyed", "conflict", "fence")
    told = scratch.probe("shelf.put", "--count", '{ tool = "items", found = "length(items[?key == $key])" }')
    assert (told["grade"], told["shown"]["look_up"], told["shown"]["repeat"]) == ("D", False, True), told
    assert tomllib.loads(told["harness_toml"])["tools"]["shelf"]["put"]["recovery"] == "idempotent"


def test_effects_that_nothing_counts_are_not_taken_for_seen(tmp_path: Path) -> None:
    """A look-up by key returns one item however many there are, and the answers name none: no better than C."""
    declared = SHELF.replace("fences = true\n", "").replace(
        'tool = "items", found = "items[?key == $key] | [0]"',
        'tool = "find", arguments = { key = "$key" }, found = "item"',
    )
    told = Scratch(tmp_path, declared, "forks").probe("shelf.put")
    assert (told["grade"], told["shown"]["repeat"], told["shown"]["keyed"]) == ("C", None, None), told
    assert told["unproven"][0] == 'declared recovery = "keyed"; not seen: a repeat adds nothing'
    assert "nothing counts the effects (--count)" in saw(told, "repeat")


def test_an_http_server_is_graded_by_the_rest(tmp_path: Path) -> None:
    """It is no process of ours: it is neither killed nor frozen nor restarted, and the report says so."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, "server.py", "--db", str(tmp_path / "t.sqlite"), "--transport", "http", "--port", str(port)]
    env = os.environ | {"MINIHARNESS_TOKEN": "a-token"}
    server = subprocess.Popen(argv, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr
        assert "listening" in server.stderr.readline()
        entry = {"type": "http", "url": f"http://127.0.0.1:{port}/mcp", "headers": {"Authorization": "Bearer a-token"}}
        told = Scratch(tmp_path, TICKET, tickets=entry).probe("tickets.create_review_ticket", source="s", title="t")
        assert (told["grade"], told["code"]) == ("A", 0), told
        untried = [e["name"] for e in told["experiments"] if e["verdict"] == "not tried"]
        assert untried == ["restart", "kill", "freeze"]
        assert "over HTTP" in saw(told, "kill")
        assert server.poll() is None
    finally:
        server.kill()
        server.communicate()


def test_a_server_is_listed_with_its_hints_and_what_is_declared(tmp_path: Path) -> None:
    """Nothing is written, so no --scratch is needed; hints are the server's words."""
    scratch = Scratch(tmp_path, SET)
    code, out, _ = scratch.command("shelf", "--json")
    tools = {entry["tool"]: entry for entry in map(json.loads, out.splitlines())}
    assert (code, tools["shelf.set"]["hints"], tools["shelf.put"]["declared"]) == (0, {"idempotentHint": True}, None)
    assert tools["shelf.set"]["declared"]["recovery"] == "idempotent"
    code, out, _ = scratch.command("shelf")
    assert (code, "idempotentHint=true" in out, "no: manual" in out) == (0, True, True)
    assert not (tmp_path / "shelf.json").exists()


ARGS = ("--args", '{"title": "probe"}')
QUERY = ("--lookup", '{ tool = "items" }')


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("shelf.put", *ARGS), "then add --scratch"),
        (("shelf.put", "--scratch"), "needs arguments to be tried with"),
        (("shelf.put", *ARGS, "--scratch", *QUERY), "harness.toml declares look_up of shelf.put"),
        (("shelf.find", *ARGS, "--scratch"), "shelf.find only reads"),
        (("shelf.set", *ARGS, "--scratch"), "nothing shows what shelf.set does: declare look_up"),
        (("shelf.set", *ARGS, "--scratch", "--lookup", "{ found = 'x' }"), "--lookup must be a table like"),
        (("shelf.set", *ARGS, "--scratch", "--lookup", "items"), "--lookup must be a table like"),
        (("shelf.set", *ARGS, "--scratch", *QUERY), "'status' is a required property"),
        (("shelf.set", "--args", '{"n": 1.5}', "--scratch", *QUERY), "no text that may vary"),
        (("shelf.put", *ARGS, "--scratch", "--vary", "titel"), "--vary titel must name an argument"),
        (("shelf.put", "--args", '{"title": "x", "key": "k"}', "--scratch"), "leave it out of --args"),
        (
            ("shelf.set", *ARGS, "--scratch", "--count", "{ tool = 'items', found = '$args.x' }"),
            "$args.x is no argument",
        ),
        (("shelf.put", "--args", "[]", "--scratch"), "--args must be a JSON object"),
        (("nothing.put", *ARGS, "--scratch"), "has no server 'nothing'"),
    ],
)
def test_a_wrong_command_writes_nothing_and_says_what_to_do(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    """Exit code 2, one line, and the scratch data is untouched."""
    scratch = Scratch(tmp_path, SHELF + '[tools.shelf.find]\nrecovery = "read"\n')
    code, out, err = scratch.command(*words)
    assert (code, out, told in err) == (2, "", True), err
    assert not (tmp_path / "shelf.json").exists()


def test_a_tool_that_refuses_the_first_write_is_not_graded(tmp_path: Path) -> None:
    """Arguments that the tool does not take show nothing about its recovery."""
    scratch = Scratch(tmp_path, '[tools.notes.grumble]\nrecovery = "lookup"\n' + LOOK_UP)
    code, out, err = scratch.command("notes.grumble", *ARGS, "--scratch")
    assert (code, out, "does not take the very first write" in err) == (2, "", True), err


def test_the_report_is_for_a_person_and_the_kills_are_real(tmp_path: Path) -> None:
    """Every experiment, the grade, the lines that fit; of seven servers four never came to leave in good order."""
    code, out, _ = Scratch(tmp_path, SHELF, "keyed", "conflict").command("shelf.put", *ARGS, "--scratch")
    assert (code, out.splitlines()[0]) == (1, "shelf.put: grade B")
    for part in ("late write: looked up, then sent", "harness.toml: declared fences = true", "[tools.shelf.put]"):
        assert part in out
    log = (tmp_path / "shelf.log").read_text().split()
    assert (log.count("began"), log.count("left") <= 3) == (7, True)
