"""Hooks: what programs and functions of the operator may say of a call, and what comes of their failures."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_calls import ADD, LOOK_UP, Place

from miniharness.errors import UsageError
from miniharness.tools import config, hooks, results
from miniharness.tools.hooks import Hook, Hooks, Verdict
from miniharness.tools.policy import Policy
from miniharness.tools.rules import Behavior, Call

SEEN = {"tool_name": "mcp__pay__refund", "tool_input": {"amount": 5}}


def of(folder: Path, *commands: str, event: str = "PreToolUse", matcher: str = "", **more: Any) -> Hooks:
    """The hooks of a settings file with these commands."""
    (folder / ".claude").mkdir(exist_ok=True)
    handlers = [{"type": "command", "command": command} | more for command in commands]
    plain = {"hooks": {event: [{"matcher": matcher, "hooks": handlers}]}}
    (folder / ".claude" / "settings.json").write_text(json.dumps(plain))
    return hooks.load(config.load(folder))


def told(**special: Any) -> str:
    return f"echo '{json.dumps({'hookSpecificOutput': special})}'"


ANSWERS = {
    "nothing": ("true", "none"),
    "text": ("echo fine", "none"),
    "exit code 2": ("echo no >&2; exit 2", "deny"),
    "allow": (told(permissionDecision="allow"), "allow"),
    "ask": (told(permissionDecision="ask"), "ask"),
    "defer": (told(permissionDecision="defer"), "ask"),
    "deny": (told(permissionDecision="deny", permissionDecisionReason="no"), "deny"),
    "an old deny": ("""echo '{"decision": "block", "reason": "no"}'""", "deny"),
    "an old allow": ("""echo '{"decision": "approve"}'""", "allow"),
    "stop": ("""echo '{"continue": false, "stopReason": "no"}'""", "deny"),
    "2 wins over JSON": (f"{told(permissionDecision='allow')}; echo no >&2; exit 2", "deny"),
    "JSON wins over 1": (f"{told(permissionDecision='ask')}; exit 1", "ask"),
}
FAILURES = {
    "a crash": "exit 1",
    "a signal": "kill -9 $$",
    "missing": "./not-there.sh",
    "broken JSON": "echo '{'",
    "JSON that says nothing": """echo '{"foo": 1}'""",
    "a list": "echo '[1, 2]'",
    "another word": told(permissionDecision="perhaps"),
    "arguments that are none": told(updatedInput=[1]),
    "too long": "sleep 300",
}


@pytest.mark.parametrize(("command", "behavior"), ANSWERS.values(), ids=ANSWERS)
async def test_a_command_says_it_by_exit_code_or_json(tmp_path: Path, command: str, behavior: str) -> None:
    """As existing hook scripts do; the reason comes with it."""
    verdict = await of(tmp_path, command).say("PreToolUse", SEEN)
    assert verdict.behavior == behavior
    assert verdict.reason == ("no" if behavior == "deny" else "")


@pytest.mark.parametrize("command", FAILURES.values(), ids=FAILURES)
async def test_a_hook_that_fails_denies_unless_it_may_fail(tmp_path: Path, command: str) -> None:
    """T12: whatever is wrong with it; its time limit holds."""
    start = time.monotonic()
    verdict = await of(tmp_path, command, timeout=0.5).say("PreToolUse", SEEN)
    assert verdict.behavior == "deny"
    assert verdict.reason.startswith(f"the hook {command} failed: ")
    optional = of(tmp_path, command, timeout=0.5, on_failure="allow")
    assert (await optional.say("PreToolUse", SEEN)).behavior == "none"
    assert time.monotonic() - start < 100


async def test_a_hook_sees_the_call_and_where_it_belongs(tmp_path: Path) -> None:
    """On its standard input as JSON, in the folder of its file."""
    verdict = await of(tmp_path, 'cat > seen.json; pwd >> seen.json; echo "$CLAUDE_PROJECT_DIR" >> seen.json').say(
        "PreToolUse", SEEN
    )
    assert verdict == Verdict()
    seen, where, project = (
        (tmp_path / "seen.json").read_text().splitlines() if False else _split(tmp_path / "seen.json")
    )
    assert json.loads(seen) == {"hook_event_name": "PreToolUse", **SEEN}
    assert where == project == str(tmp_path)


def _split(path: Path) -> list[str]:
    text = path.read_text()
    return [text[: text.rindex("}") + 1], *text[text.rindex("}") + 1 :].split()]


async def test_a_time_out_ends_the_whole_tree(tmp_path: Path) -> None:
    """What a hook has started writes nothing any more."""
    await of(tmp_path, "(sleep 1; touch late) & sleep 300", timeout=0.3).say("PreToolUse", SEEN)
    await asyncio.sleep(1.2)
    assert not (tmp_path / "late").exists()


async def test_all_hooks_run_and_the_strongest_word_counts(tmp_path: Path) -> None:
    """One of three denies: the other two have run; identical ones ran once."""
    commands = ["echo x >> ran", "echo x >> ran", "echo y >> ran; exit 2", told(permissionDecision="allow")]
    verdict = await of(tmp_path, *commands).say("PreToolUse", SEEN)
    assert (verdict.behavior, sorted((tmp_path / "ran").read_text().split())) == ("deny", ["x", "y"])


@pytest.mark.parametrize(
    ("matcher", "matches"),
    [("", True), ("*", True), ("mcp__pay__refund", True), ("mcp__pay", False), ("a|mcp__pay__refund", True),
     ("a, mcp__pay__refund", True), ("mcp__pay__.*", True), ("refund$", True), ("^refund", False)],
)  # fmt: skip
async def test_a_matcher_is_names_or_a_pattern(tmp_path: Path, matcher: str, matches: bool) -> None:
    """Plain text is a list of whole names; anything else is an unanchored pattern."""
    verdict = await of(tmp_path, "exit 2", matcher=matcher).say("PreToolUse", SEEN)
    assert (verdict.behavior == "deny") is matches


async def test_two_hooks_that_want_different_arguments_deny(tmp_path: Path) -> None:
    """One rewrite is taken; the same one twice, too."""
    one, other = told(updatedInput={"amount": 1}), told(updatedInput={"amount": 2})
    assert (await of(tmp_path, one, f"{one} ").say("PreToolUse", SEEN)).arguments == {"amount": 1}
    assert (await of(tmp_path, one, other).say("PreToolUse", SEEN)).behavior == "deny"


async def test_a_function_is_a_hook_like_any_other() -> None:
    """It gets what a command gets; an exception in it denies."""

    async def careful(seen: Any) -> Verdict:
        return Verdict("ask", f"{seen['tool_input']['amount']} is much")

    async def broken(seen: Any) -> Verdict:
        raise KeyError("limit")

    known = Hooks([Hook("PreToolUse", "", "careful", careful)])
    assert await known.say("PreToolUse", SEEN) == Verdict("ask", "5 is much")
    known = Hooks([Hook("PreToolUse", "", "careful", careful), Hook("PreToolUse", "", "broken", broken)])
    assert (await known.say("PreToolUse", SEEN)).behavior == "deny"


@pytest.mark.parametrize(("said", "rule", "wanted"), [
    ("allow", [], Behavior.ASK), ("allow", ["deny"], Behavior.DENY), ("ask", ["allow"], Behavior.ASK),
    ("deny", ["allow"], Behavior.DENY), ("none", ["allow"], Behavior.ALLOW), ("allow", ["allow"], Behavior.ALLOW),
])  # fmt: skip
def test_a_hooks_allow_never_skips_a_rule(tmp_path: Path, said: Any, rule: list[str], wanted: Behavior) -> None:
    """The stricter of both counts."""
    (tmp_path / "harness.toml").write_text("[rules]\n" + "".join(f'{name} = ["mcp__pay"]\n' for name in rule))
    known = Policy.of(config.load(tmp_path))
    asked = replace(known, said=Verdict(said))
    assert asked.decide(Call("mcp__pay__refund", {})).behavior is wanted


def test_what_cannot_be_run_is_named_and_a_broken_file_denies_every_write(tmp_path: Path) -> None:
    """Another event is named; a hook before the call that is no command makes the file unusable."""
    known = of(tmp_path, "true", event="SessionStart")
    assert "hooks.SessionStart" in known.unsupported[0]
    (tmp_path / ".claude" / "settings.json").write_text('{"hooks": []}')
    assert Policy.of(config.load(tmp_path)).decide(Call("mcp__pay__refund", {})).behavior is Behavior.DENY
    assert Policy.of(config.load(tmp_path)).decide(Call("mcp__pay__list", {}), "read").behavior is Behavior.ALLOW
    (tmp_path / "harness.toml").write_text("[hooks]\nPreToolUse = [3]\n")
    with pytest.raises(UsageError, match=r"harness.toml: hooks.PreToolUse\[0\] must be"):
        hooks.load(config.load(tmp_path))


@pytest.mark.parametrize("more", [{"type": "prompt"}, {"async": True}])
async def test_a_hook_that_is_not_run_here_denies_what_it_is_about(tmp_path: Path, more: Any) -> None:
    """It is named, and no other tool suffers."""
    known = of(tmp_path, "true", matcher="mcp__pay__refund", **more)
    assert "only hooks of type command" in known.unsupported[0]
    assert (await known.say("PreToolUse", SEEN)).behavior == "deny"
    assert (await known.say("PreToolUse", SEEN | {"tool_name": "mcp__notes__add"})).behavior == "none"


# -- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("card 4111 1111 1111 1111.", "card 4111********1111."),
        ("card 4111111111111111", "card 4111********1111"),
        ("card 4111111111111112", "card 4111111111111112"),
        ("no card 12345678901", "no card 12345678901"),
        ("key sk-" + "a" * 24, "key [secret]"),
        ("Authorization: Bearer abcdefghijklmnopqrstuv", "Authorization: Bearer [secret]"),
        ("ghp_abcdefghijklmnopqrstuvwx and AKIAABCDEFGHIJKLMNOP", "[secret] and [secret]"),
        ("the value is hunter2hunter2!", "the value is [secret]!"),
        ("核验 is text", "核验 is text"),
    ],
)
def test_secrets_are_masked_by_shape_and_by_value(text: str, shown: str) -> None:
    """T13: card numbers keep their ends; in texts, keys and lists alike."""
    known = results.secrets({"DB_PASSWORD": "hunter2hunter2", "HOME": "/home/me", "API_KEY": "short"})
    assert known == ["hunter2hunter2"]
    assert results.masked({"a": [text, {text: 1}]}, known) == {"a": [shown, {shown: 1}]}


def test_a_long_result_is_cut_with_a_word_and_kept_whole(tmp_path: Path) -> None:
    """T5: the limit and the size are told, characters stay whole, and the hash finds all of it."""
    text = "核" * 1000
    told_text = results.cut(text, 100, tmp_path)
    assert told_text.startswith("核" * 33 + "\n[cut: 100 of 3000 bytes")
    assert results.kept(tmp_path, told_text.split()[-1].rstrip("]")) == text
    assert results.cut("short", 100, tmp_path) == "short"
    for wrong in ("x", "0" * 64, "../runs.sqlite"):
        with pytest.raises(UsageError, match="there is no result"):
            results.kept(tmp_path, wrong)


# -- the whole way ----------------------------------------------------------------------------------------------------


class Hooked(Place):
    """A place with hooks."""

    def hook(self, event: str, command: str) -> None:
        of(self.folder, command, event=event)


@pytest.mark.process
def test_a_hook_before_the_call_can_stop_or_change_it(tmp_path: Path) -> None:
    """What it rewrites is checked and written; another rewrite later is another contract."""
    place = Hooked(tmp_path, ADD.format("lookup") + LOOK_UP)
    place.hook("PreToolUse", "echo 'not on Mondays' >&2; exit 2")
    stopped = place.call("--execute")
    assert (stopped["code"], stopped["interrupted"]["error"], place.titles()) == (1, "Denied", [])
    assert "not on Mondays" in stopped["interrupted"]["message"]
    place.hook("PreToolUse", told(updatedInput={"title": "changed"}))
    assert (place.call("--execute")["state"], place.titles()) == ("succeeded", ["changed"])
    place.hook("PreToolUse", told(updatedInput={"title": 7}))
    code, _, err = place.command(
        "call", "notes.add", "--args", '{"title": "b"}', "--config", str(tmp_path), "--execute"
    )
    assert (code, "7 is not of type 'string'" in err, place.titles()) == (2, True, ["changed"])


@pytest.mark.process
def test_hooks_after_the_call_run_when_the_result_is_on_disk(tmp_path: Path) -> None:
    """They are told what was found, or why it failed; what they say changes nothing."""
    place = Hooked(tmp_path, ADD.format("lookup") + LOOK_UP)
    state = "import sqlite3; print(*sqlite3.connect('state/runs.sqlite').execute('select state from runs').fetchone())"
    place.hook("PostToolUse", f'cat > after.json; {sys.executable} -c "{state}" > row; exit 2')
    assert place.call("--execute")["state"] == "succeeded"
    seen = json.loads((tmp_path / "after.json").read_text())
    assert (seen["hook_event_name"], seen["tool_response"]["action"]) == ("PostToolUse", {"title": "hello"})
    assert "succeeded" in (tmp_path / "row").read_text()


@pytest.mark.process
def test_a_hook_can_answer_in_a_persons_place(tmp_path: Path) -> None:
    """Its yes is an approval like any other, and stands in the history."""
    place = Hooked(tmp_path, ADD.format("lookup") + LOOK_UP)
    (tmp_path / "harness.toml").write_text(ADD.format("lookup") + LOOK_UP)  # without rules: ask
    place.hook("PermissionRequest", told(decision={"behavior": "allow"}))
    done = place.call("--execute")
    assert (done["state"], place.titles()) == ("succeeded", ["hello"])
    assert "a PermissionRequest hook" in json.dumps(done["events"])
    place.hook("PermissionRequest", told(decision={"behavior": "deny"}))
    assert place.call("--execute", title="other")["code"] == 1
    assert place.titles() == ["hello"]
