"""What the operator declares: both files, and what is told when they are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import ROOT

from miniharness.errors import UsageError
from miniharness.tools import config, references

KEYED = """\
[tools.tickets.create]
recovery = "keyed"
key = "operation_key"
look_up = { tool = "find", arguments = { key = "$key" }, found = "ticket" }
"""

LOOKED_UP = 'recovery = "lookup"\nlook_up = { tool = "t", '


def written(folder: Path, servers: Any = None, tools: str = "") -> Path:
    if servers is not None:
        text = servers if isinstance(servers, str) else json.dumps({"mcpServers": servers})
        (folder / ".mcp.json").write_text(text)
    (folder / "harness.toml").write_text(tools)
    return folder


def fault(folder: Path) -> str:
    with pytest.raises(UsageError) as told:
        config.load(folder)
    return str(told.value)


def test_a_folder_without_files_declares_nothing(tmp_path: Path) -> None:
    """Neither file is needed; a tool that nobody declared is manual."""
    settings = config.load(tmp_path)
    assert (settings.servers, settings.tools) == ({}, {})
    assert settings.tool("any", "tool").recovery == "manual"


def test_servers_are_taken_as_people_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """stdio and HTTP entries, variables with and without a default, and fields that we do not know."""
    monkeypatch.setenv("SECRET", "s3")
    monkeypatch.setenv("EMPTY", "")
    servers = {
        "local": {"command": "npx", "args": ["-y", "${PKG:-thing}"], "env": {"KEY": "a${SECRET}b"}, "timeout": 7},
        "far": {"type": "http", "url": "https://x/${EMPTY:-mcp}", "headers": {"Authorization": "Bearer ${SECRET}"}},
    }
    loaded = config.load(written(tmp_path, servers)).servers
    assert loaded["local"].command == ("npx", "-y", "thing")
    assert loaded["local"].env == {"KEY": "as3b"}
    assert (loaded["far"].url, loaded["far"].headers) == ("https://x/mcp", {"Authorization": "Bearer s3"})
    assert "s3" not in loaded["far"].identity + loaded["local"].identity


def test_what_names_a_server_does_not_change_with_the_value_of_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new token is the same server; another command is another."""
    entry = {"command": "x", "env": {"TOKEN": "${SECRET}"}}
    seen = []
    for secret in "ab":
        monkeypatch.setenv("SECRET", secret)
        seen.append(config.load(written(tmp_path, {"s": entry})).servers["s"].identity)
    other = config.load(written(tmp_path, {"s": entry | {"command": "y"}})).servers["s"].identity
    assert seen[0] == seen[1] != other


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"type": "sse", "url": "http://x"}, "its type 'sse' is not supported"),
        ({"command": "${NOT_THERE}"}, "the environment has no NOT_THERE"),
        ({"command": 3}, "must be text"),
        ({"command": "x", "args": "y"}, "must be text"),
        ({"command": "x", "env": {"A": 1}}, "must be text"),
        ({"type": "http"}, "it has no url"),
        ({}, "it has no command"),
        (None, "it must be an object"),
    ],
)
def test_a_broken_server_is_set_aside_and_no_other(tmp_path: Path, entry: Any, problem: str) -> None:
    """It is named when somebody wants to use it; the rest of the file counts."""
    settings = config.load(written(tmp_path, {"bad": entry, "good": {"command": "x"}}))
    assert settings.server("good").command == ("x",)
    with pytest.raises(UsageError, match=f"mcpServers.bad: .*{problem}"):
        settings.server("bad")


@pytest.mark.parametrize("text", ["{", "[]", '{"mcpServers": 3}', "null"])
def test_a_servers_file_of_another_form_is_an_error_with_its_name(tmp_path: Path, text: str) -> None:
    """Nothing is guessed."""
    assert ".mcp.json" in fault(written(tmp_path, text))


def test_a_declared_tool_is_taken_whole(tmp_path: Path) -> None:
    """Three lines for one dangerous tool."""
    tool = config.load(written(tmp_path, tools=KEYED)).tool("tickets", "create")
    assert (tool.recovery, tool.key, tool.deduplicates, tool.fences) == ("keyed", "operation_key", True, False)
    assert tool.look_up
    assert (tool.look_up.tool, tool.look_up.arguments) == ("find", {"key": "$key"})


def test_a_tool_that_keeps_outcomes_is_fenced_and_needs_nothing_else(tmp_path: Path) -> None:
    """Two lines; the key may be an argument of the tool."""
    outcome = '[tools.tickets.create]\nrecovery = "keyed"\noutcome = true\n'
    for text in (outcome, outcome + 'key = "op"\n'):
        tool = config.load(written(tmp_path, tools=text)).tool("tickets", "create")
        assert (tool.fenced, tool.deduplicates, tool.look_up) == (True, True, None)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('recovery = "sometimes"', "harness.toml:3: tools.a.b.recovery"),
        ('recovery = "manual"\nfence = true', "harness.toml:4: tools.a.b.fence"),
        ('recovery = "keyed"', 'harness.toml:2: tools.a.b: .*"keyed" needs outcome, or key'),
        ('recovery = "lookup"\nlook_up = { tool = "t" }\noutcome = true', 'outcome is for recovery = "keyed"'),
        ('recovery = "keyed"\nlook_up = { tool = "t" }\noutcome = true', "the outcome method is the look-up"),
        ('recovery = "manual"\noutcome = true', 'outcome is for recovery = "keyed"'),
        ('recovery = "lookup"', "needs look_up"),
        ('recovery = "read"\nkey = "k"', 'recovery = "read" takes no key'),
        ('recovery = "idempotent"\nfences = true', "fences needs look_up"),
        ('recovery = "lookup"\nlook_up = { tool = "t", found = "[?" }', "harness.toml:4: .*found: .*JMESPath"),
        ('recovery = "manual"\ntimeout = 0', "harness.toml:4: tools.a.b.timeout"),
        ('recovery = "manual"\nsettles_after = -1', "harness.toml:4: tools.a.b.settles_after"),
        ('recovery = "manual"\nresource = "state"', "harness.toml:4: tools.a.b.resource"),
        ('recovery = "manual"\nclean_errors = [{ message = "(" }]', "not a regular expression"),
        ('recovery = "manual"\nclean_errors = [{}]', "either code or message"),
        (LOOKED_UP + 'rows = "(" }', "harness.toml:4: .*rows: .*not a regular expression"),
        (LOOKED_UP + 'rows = "a" }', "harness.toml:4: .*rows: .*needs named groups"),
        (LOOKED_UP + 'reads = "json", valid = "a" }', 'valid and rows need reads = "text"'),
        (LOOKED_UP + 'absent = [{ code = "a", message = "b" }] }', "either code or message"),
        ("recovery = ", "harness.toml: .*line 3"),
    ],
)
def test_what_is_wrong_in_a_declaration_is_told_with_file_line_and_field(tmp_path: Path, line: str, told: str) -> None:
    """A typo never widens what a tool may do."""
    text = f"# tools\n[tools.a.b]\n{line}\n"
    import re

    assert re.search(told, fault(written(tmp_path, tools=text)))


def test_the_schema_of_the_file_is_printed_and_the_check_tells_what_is_missing(tmp_path: Path) -> None:
    """Both commands connect to nothing; a tool of a server that is not there is a fault."""
    command = [sys.executable, "-m", "miniharness", "config"]
    written(tmp_path, {"other": {"command": "${NOT_THERE}"}}, KEYED)
    schema = subprocess.run([*command, "schema"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "settles_after" in json.dumps(json.loads(schema))
    words = [*command, "check", "--config", str(tmp_path)]
    checked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 2
    assert "tickets.create" in checked.stdout
    assert "tools.tickets: there is no such server" in checked.stderr
    assert "mcpServers.other: the environment has no NOT_THERE" in checked.stderr


@pytest.mark.parametrize(
    ("expression", "field"),
    [
        ("ticket", "ticket"), ("notes[?a == $args.a] | [0]", "notes"), ("a.b.c", "a"), ("a[0].b", "a"), ("a[].b", "a"),
        ("a.*.b", "a"), ("@", None), ("@.a", None), ("[0]", None), ("a || b", None), ("contains(@, 'x')", None),
    ],
)  # fmt: skip
def test_the_field_that_must_be_there_is_the_one_an_expression_begins_with(expression: str, field: str | None) -> None:
    """A choice or a function may do without."""
    assert references.leading_field(expression) == field
