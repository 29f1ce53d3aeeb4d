"""Rules: what may be called, by the files that people have and by our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import ROOT

from miniharness.errors import UsageError
from miniharness.tools import config, rules
from miniharness.tools.rules import Behavior, Call

DENY, ASK, ALLOW = Behavior


def of(folder: Path, *, local: Any = None, ours: str = "", **permissions: list[str]) -> rules.Rules:
    """The rules of a folder with these lists in settings.json, in settings.local.json and in harness.toml."""
    (folder / ".claude").mkdir(exist_ok=True)
    (folder / ".claude" / "settings.json").write_text(json.dumps({"permissions": permissions}, indent=2))
    if local is not None:
        text = local if isinstance(local, str) else json.dumps({"permissions": local})
        (folder / ".claude" / "settings.local.json").write_text(text)
    (folder / "harness.toml").write_text(ours)
    return rules.load(config.load(folder))


def a_call(tool: str = "mcp__pay__refund", **arguments: Any) -> Call:
    return Call(tool, arguments)


def test_deny_comes_before_ask_and_ask_before_allow(tmp_path: Path) -> None:
    """T11: specificity never matters, the file does not matter, and what no rule names is asked about."""
    known = of(tmp_path, local={"deny": ["mcp__pay__*"]}, allow=["mcp__pay__refund", "mcp__notes"], ask=["mcp__*__add"])
    assert known.decide(a_call()).behavior is DENY
    assert known.decide(a_call("mcp__notes__add")).behavior is ASK
    assert known.decide(a_call("mcp__notes__put")).behavior is ALLOW
    assert known.decide(a_call("mcp__other__put")).behavior is ASK
    assert known.decide(a_call("mcp__other__put"), "read").behavior is ALLOW
    assert known.decide(a_call(), "read").behavior is DENY


@pytest.mark.parametrize(
    ("rule", "tool", "matches"),
    [
        ("mcp__pay", "mcp__pay__refund", True),
        ("mcp__pay", "mcp__payments__refund", False),
        ("mcp__pay__*", "mcp__pay__refund", True),
        ("mcp__pay__ref*", "mcp__pay__refund", True),
        ("mcp__pay__ref", "mcp__pay__refund", False),
        ("mcp__*", "mcp__pay__refund", True),
        ("*", "mcp__pay__refund", True),
        ("mcp__pay__refund(*)", "mcp__pay__refund", True),
        ("mcp__pay__re.und", "mcp__pay__refund", False),
    ],
)
def test_names_match_whole(tmp_path: Path, rule: str, tool: str, matches: bool) -> None:
    """`mcp__server` is all its tools; a star stands for anything; nothing else is a pattern."""
    assert (of(tmp_path, deny=[rule]).decide(a_call(tool)).behavior is DENY) is matches


@pytest.mark.parametrize("rule", ["*", "mcp__*", "m*", "mcp__*__read", "mcp__pay*__refund"])
def test_an_allow_rule_is_for_one_server(tmp_path: Path, rule: str) -> None:
    """One that is not is skipped, and named."""
    known = of(tmp_path, allow=[rule])
    assert known.decide(a_call()).behavior is ASK
    assert rule in known.unsupported[0]


@pytest.mark.parametrize(
    ("rule", "given", "matches"),
    [
        ("(to:admin)", {"to": "admin"}, True),
        ("( to : admin )", {"to": "admin"}, True),
        ("(to:adm*n)", {"to": "admiration"}, True),
        ("(to:adm*n)", {"to": "admi\nn"}, True),
        ("(to:admin)", {"to": "administrator"}, False),
        ("(to:*)", {"for": "admin"}, False),
        ("(to:*)", {"to": None}, False),
        ("(to:*)", {"to": {"name": "admin"}}, False),
        ("(now:true)", {"now": True}, True),
        ("(amount:7)", {"amount": 7}, True),
        ("(amount:7)", {"amount": 7.5}, False),
    ],
)
def test_a_parameter_rule_is_about_one_plain_argument(tmp_path: Path, rule: str, given: Any, matches: bool) -> None:
    """As it was given; one that is omitted never matches."""
    known = of(tmp_path, deny=[f"mcp__pay__refund{rule}"])
    assert (known.decide(Call("mcp__pay__refund", given)).behavior is DENY) is matches


def test_a_parameter_rule_cannot_allow(tmp_path: Path) -> None:
    """It is skipped, and named."""
    known = of(tmp_path, allow=["mcp__pay__refund(to:me)"])
    assert known.decide(a_call(to="me")).behavior is ASK
    assert "for deny and ask" in known.unsupported[0]


@pytest.mark.parametrize(
    ("amount", "wanted"), [(1000, ALLOW), (1000.01, DENY), (5000, DENY), ("5000", DENY), (True, DENY), ([1], DENY)]
)
def test_a_number_is_compared_in_our_own_file(tmp_path: Path, amount: Any, wanted: Behavior) -> None:
    """What is given and is no number cannot be ruled out, so the deny takes it."""
    ours = """
[rules]
allow = ["mcp__pay__refund"]
deny = [{ rule = "mcp__pay__refund", when = "amount > 1000" }]
"""
    known = of(tmp_path, ours=ours)
    assert known.decide(a_call(amount=amount)).behavior is wanted
    assert known.decide(a_call()).behavior is ALLOW


def test_an_allowed_number_must_be_one(tmp_path: Path) -> None:
    """An allow does not take what it cannot compare."""
    known = of(tmp_path, ours='[rules]\nallow = [{ rule = "mcp__pay__refund", when = "amount <= 10" }]\n')
    assert known.decide(a_call(amount=10)).behavior is ALLOW
    assert known.decide(a_call(amount="10")).behavior is ASK


def test_examples_are_tried_whenever_the_file_is_read(tmp_path: Path) -> None:
    """A rule that does not do what its examples say is an error with file and line."""
    good = '{ rule = "mcp__pay__refund", when = "amount > 9", match = [{ args = { amount = 10 } }], not_match = [{}] }'
    assert of(tmp_path, ours=f"[rules]\ndeny = [\n  {good},\n]\n").decide(a_call(amount=10)).behavior is DENY
    with pytest.raises(UsageError, match=r"harness.toml:3: the rule .* does not match its example"):
        of(tmp_path, ours=f"[rules]\ndeny = [\n  {good.replace('amount = 10', 'amount = 9')},\n]\n")
    with pytest.raises(UsageError, match="matches its example"):
        of(tmp_path, ours=f"[rules]\ndeny = [\n  {good.replace('[{}]', '[{ args = { amount = 11 } }]')},\n]\n")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"permissions": []}', '{"permissions": {"deny": "x"}}', '{"permissions": {"deny": [1]}}']
)
def test_a_file_that_cannot_be_read_denies_every_write(tmp_path: Path, text: str) -> None:
    """T11: and says which file; what only reads goes on."""
    known = of(tmp_path, local=text, allow=["mcp__pay__refund"])
    decision = known.decide(a_call())
    assert (decision.behavior, "settings.local.json" in decision.reason) == (DENY, True)
    assert known.decide(a_call("mcp__pay__list"), "read").behavior is ALLOW


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    """Nothing is ignored silently: other tools' rules, modes, and what is no rule."""
    (tmp_path / ".claude").mkdir()
    (tmp_path / ".claude" / "settings.local.json").write_text('{"disableAllHooks": true, "env": {}}')
    assert [name.rpartition(" ")[2] for name in rules.load(config.load(tmp_path)).unsupported] == [
        "disableAllHooks",
        "env",
    ]
    (tmp_path / ".claude" / "settings.local.json").unlink()
    known = of(tmp_path, allow=["WebFetch(domain:x)", "a b", "Agent(Explore)"], defaultMode=["plan"])
    assert len(known.unsupported) == 4
    assert "permissions.defaultMode" in known.unsupported[0]
    assert "settings.json:4" in known.unsupported[1]


# -- paths ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with some files and links in it."""
    for name in ("src/deep", "secrets", "pkg/src", "pkg/secrets"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".env").touch()
    os.symlink(tmp_path / ".env", tmp_path / "src" / "harmless")
    os.symlink(tmp_path / "src", tmp_path / "secrets" / "out")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("rule", "access", "path", "denied"),
    [
        ("Read(.env)", "read", ".env", True),
        ("Read(./.env)", "read", "src/../.env", True),
        ("Read(.env)", "read", "pkg/.env", True),
        ("Read(.env)", "edit", ".env", True),
        ("Edit(.env)", "read", ".env", False),
        ("Read(.env)", "read", "src/harmless", True),
        ("Read(./secrets/**)", "read", "pkg/secrets/key", True),
        ("Read(secrets/**)", "read", "secrets/out/new", True),
        ("Read(/secrets/**)", "read", "pkg/secrets/key", False),
        ("Read(/secrets/**)", "read", "secrets/new/key", True),
        ("Read(//etc/**)", "read", "/etc/passwd", True),
        ("Read(~/.ssh/**)", "read", "~/.ssh/id", True),
        ("Read(*.key)", "read", "src/deep/a.key", True),
        ("Read(/*.key)", "read", "src/deep/a.key", False),
    ],
)
def test_a_denied_path_is_denied_however_it_is_written(
    place: Path, rule: str, access: Any, path: str, denied: bool
) -> None:
    """As it is written or as it resolves, through links and through what does not exist yet."""
    known = of(place, deny=[rule], allow=["mcp__files"])
    decision = known.decide(Call("mcp__files__use", {}, ((access, path),)))
    assert (decision.behavior is DENY) is denied


@pytest.mark.parametrize(
    ("rule", "path", "allowed"),
    [
        ("Edit(src/**)", "src/a", True),
        ("Edit(src/**)", "pkg/src/a", False),
        ("Edit(src/**)", "src/harmless", False),
        ("Edit(src/**)", "secrets/out/a", False),
        ("Edit(src/**)", "src/../secrets/a", False),
        ("Read(src/**)", "src/a", False),
        ("Edit(/src/**)", "src/deep/new/file", True),
    ],
)
def test_an_allowed_path_must_be_allowed_both_ways(place: Path, rule: str, path: str, allowed: bool) -> None:
    """A link into the folder or out of it is not in it."""
    decision = of(place, allow=[rule]).decide(Call("mcp__files__edit", {}, (("edit", path),)))
    assert (decision.behavior is ALLOW) is allowed


def test_the_decision_is_explained(tmp_path: Path) -> None:
    """With the rule, its file and line, and what would have decided without it."""
    of(tmp_path, deny=["mcp__pay__refund(to:admin)"], allow=["mcp__pay", "Skill(x)"])
    (tmp_path / ".mcp.json").write_text('{"mcpServers": {"pay": {"command": "x"}}}')
    words = [sys.executable, "-m", "miniharness", "rules", "explain", "--config", str(tmp_path)]
    told = subprocess.run([*words, "mcp__pay__refund", '{"to": "admin"}'], cwd=ROOT, capture_output=True, text=True)
    settings = tmp_path / ".claude" / "settings.json"
    assert told.stdout.splitlines() == [
        f"deny: deny mcp__pay__refund(to:admin) ({settings}:4)",
        f"without it: allow mcp__pay ({settings}:7)",
    ]
    assert "Skill(x)" in told.stderr
    plain = subprocess.run([*words, "pay.other", "--json"], cwd=ROOT, capture_output=True, text=True)
    assert json.loads(plain.stdout)["decision"] == "allow"


# -- shell commands ---------------------------------------------------------------------------------------------------

SHELL_RULES = {
    "allow": ["Bash(git log *)", "Bash(npm test *)", "Bash(echo *)", "Bash(grep *)"],
    "deny": ["Bash(rm *)", "Bash(curl *)", "Read(./.env)"],
}
COMMANDS = {
    "allow": [
        "git log --oneline", "git log", "NODE_ENV=test npm test", 'echo "a && rm x"', "echo 'a; rm x'", 'grep "rm " f',
        "echo a | grep b", "echo hi > /dev/null", "echo a 2>&1", "timeout 5 git log",
    ],
    "ask": [
        "git logx", "git log && make", "X=`touch y` npm test", "$(printf rm) x", 'eval "rm x"', "bash -c 'rm x'",
        "sh<<<'rm x'", "python -c 'import os;os.remove(\"x\")'", "echo hi > /etc/passwd", "echo hi > ../x",
        'echo "', "echo " + "x" * 10_001, "LD_PRELOAD=x git log", "./git log", "", "$CMD x", "r* x", "echo hi > $F",
        "f() { echo; }; f", "git log; for x in 1; do make; done",
    ],
    "deny": [
        "git log && rm -rf x", "git log; rm x", "git log | xargs rm", "git log\nrm x", "git log & rm x",
        'echo "$(rm -rf x)"', "echo `rm x`", "cat <(rm x)", "FOO=bar rm x", "timeout 5 rm x", "\\rm x", "command rm x",
        "'rm' x", 'r""m x', "echo hi > .env", "cat .env", "head -1 ./.env", "cat link_to_env", "curl  http://x",
        "/usr/bin/curl x", "if true; then rm x; fi", "(rm x)", "{ rm x; }", "! rm x", "nohup nice -n 5 rm x",
        "echo a || rm", "time rm x", "env rm x", "sudo -u me rm x", "find . -exec rm {} ;", "xargs -I {} rm {}",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("wanted", "command"), [(wanted, one) for wanted, many in COMMANDS.items() for one in many])
def test_a_shell_command_is_read_by_its_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, command: str
) -> None:
    """Whatever stands in quotes, substitutions, wrappers and lists: each command is seen, or nothing is allowed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").touch()
    os.symlink(tmp_path / ".env", tmp_path / "link_to_env")
    known = of(tmp_path, **SHELL_RULES)
    assert known.decide(Call.of_shell("mcp__sh__run", command, {"command": command})).behavior == wanted


def test_the_targets_of_a_shell_command_are_edits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allowed command may write where an allow rule says so, and nowhere else; a deny for the file wins."""
    monkeypatch.chdir(tmp_path)
    known = of(tmp_path, allow=["Bash(echo *)", "Edit(out/**)"], deny=["Edit(*.key)"])
    for target, wanted in (("out/a", ALLOW), ("a", ASK), ("out/a.key", DENY), ("out/../a", ASK)):
        assert known.decide(Call.of_shell("mcp__sh__run", f"echo hi > {target}", {})).behavior is wanted
    assert known.decide(Call.of_shell("mcp__sh__run", "make > out/a", {})).behavior is ASK
