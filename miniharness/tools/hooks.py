"""Hooks: programs and functions of the operator that see a call before and after it.

They can deny, ask and rewrite; their allow never skips a rule. A hook before a call that fails in any way denies it,
unless it is declared to be optional.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from miniharness.contract import canonical
from miniharness.errors import UsageError
from miniharness.tools.config import TOOLS, Config

EVENTS = ("PreToolUse", "PostToolUse", "PostToolUseFailure", "PermissionRequest", "Stop")
PLAIN_MATCHER = re.compile(r"[A-Za-z0-9_\- ,|]*")
ANSWER_FIELDS = {
    "continue",
    "stopReason",
    "systemMessage",
    "suppressOutput",
    "decision",
    "reason",
    "hookSpecificOutput",
}
STRENGTH = {"none": 0, "allow": 1, "ask": 2, "deny": 3}

Behavior = Literal["none", "allow", "ask", "deny"]
Seen = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a hook says: a behavior with its reason, and arguments to use instead."""

    behavior: Behavior = "none"
    reason: str = ""
    arguments: Mapping[str, Any] | None = None


Function = Callable[[Seen], Awaitable[Verdict]]
"""A hook in this process: takes what a command would get as JSON."""


class Handler(BaseModel):
    """One command, as settings files have it."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, populate_by_name=True)

    type: Literal["command"]
    command: str
    args: list[str] | None = None  # without them the command goes through the shell
    timeout: float = Field(default=60.0, gt=0, le=600)
    on_failure: Literal["block", "deny", "allow"] = Field(default="deny", alias="onFailure")


@dataclass(frozen=True, slots=True)
class Hook:
    """What to run on an event, for which tools. `optional` hooks may fail."""

    event: str
    matcher: str
    name: str
    run: Function
    optional: bool = False

    def is_about(self, tool: str) -> bool:
        """As settings files mean it: nothing or `*` is every tool, plain text a list of names, the rest a pattern."""
        if self.matcher in ("", "*"):
            return True
        if PLAIN_MATCHER.fullmatch(self.matcher):
            return tool in {name.strip() for name in re.split(r"[|,]", self.matcher)}
        return re.search(self.matcher, tool) is not None


@dataclass(frozen=True, slots=True)
class Hooks:
    """All hooks of a folder. `unsupported` names what was read and is never run; a `broken` file denies every write."""

    hooks: Sequence[Hook] = ()
    unsupported: Sequence[str] = ()
    broken: Sequence[str] = ()

    async def say(self, event: str, seen: Seen) -> Verdict:
        """Run every hook of that event which is about the tool, all of them, and return the strongest verdict."""
        tool = seen.get("tool_name")  # `Stop` is about none
        due = [hook for hook in self.hooks if hook.event == event and (tool is None or hook.is_about(str(tool)))]
        verdicts = await asyncio.gather(*(_guarded(hook, {"hook_event_name": event, **seen}) for hook in due))
        rewritten = {
            canonical(verdict.arguments): verdict.arguments for verdict in verdicts if verdict.arguments is not None
        }
        if len(rewritten) > 1:
            return Verdict("deny", "two hooks want different arguments")
        strongest = max(verdicts, key=lambda verdict: STRENGTH[verdict.behavior], default=Verdict())
        return Verdict(strongest.behavior, strongest.reason, next(iter(rewritten.values()), None))


async def _guarded(hook: Hook, seen: Seen) -> Verdict:
    """The hook's verdict; whatever goes wrong in it is one, too."""
    try:
        return await hook.run(seen)
    except Exception as error:  # a policy that cannot be asked has not agreed
        reason = f"the hook {hook.name} failed: {str(error) or type(error).__name__}"
        return Verdict("none" if hook.optional else "deny", reason)


def load(config: Config) -> Hooks:
    """The hooks of a folder's settings files and of its `harness.toml`.

    Raises:
        UsageError: those in harness.toml are not what they should be.
    """
    hooks: dict[str, Hook] = {}  # identical ones run once
    unsupported: list[str] = []
    broken: list[str] = []
    for settings in config.settings:
        try:
            _gather(settings.part("hooks"), settings.path, config.folder, hooks, unsupported)
        except UsageError as error:
            broken.append(str(error))
    _gather(config.harness.hooks, config.folder / TOOLS, config.folder, hooks, unsupported)
    return Hooks(list(hooks.values()), unsupported, broken)


def _gather(given: Mapping[str, Any], path: Path, folder: Path, hooks: dict[str, Hook], unsupported: list[str]) -> None:
    for event, groups in given.items():
        if event not in EVENTS:
            unsupported.append(f"{path}: hooks.{event}")
            continue
        for number, group in enumerate(groups if isinstance(groups, list) else [None]):
            where = f"{path}: hooks.{event}[{number}]"
            if not isinstance(group, dict) or not isinstance(group.get("hooks"), list):
                raise UsageError(f'{where} must be an object like {{"matcher": "...", "hooks": []}}')
            matcher = group.get("matcher") or ""
            for handler in group["hooks"]:
                if _is_run_here(handler):
                    hook = _made(event, matcher, handler, where, folder)
                    hooks.setdefault(canonical([event, matcher, handler]), hook)
                else:
                    unsupported.append(f"{where}: only hooks of type command are run here, and none in the background")
                    hooks.setdefault(canonical([event, matcher, handler]), Hook(event, matcher, where, _cannot_run))


async def _cannot_run(seen: Seen) -> Verdict:
    """Stands for a hook that is not run here; before a call it denies what the hook is about."""
    raise ValueError("hooks of its type are not run here")


def _is_run_here(handler: Any) -> bool:
    return isinstance(handler, dict) and handler.get("type", "command") == "command" and not handler.get("async")


def _made(event: str, matcher: Any, handler: Mapping[str, Any], where: str, folder: Path) -> Hook:
    try:
        re.compile("" if matcher == "*" else matcher)
        made = Handler.model_validate({"type": "command", **handler})
    except (ValidationError, re.error, TypeError) as error:
        raise UsageError(f"{where}: {error}") from None
    return Hook(event, matcher, made.command, Command(made, folder).run, made.on_failure == "allow")


@dataclass(frozen=True, slots=True)
class Command:
    """A hook that is a program: JSON on its standard input, and an answer on its output or by its exit code."""

    handler: Handler
    folder: Path

    async def run(self, seen: Seen) -> Verdict:
        """Run it within its time limit, and end everything it has started.

        Raises:
            OSError, TimeoutError, ValueError: it could not be run, took too long, or answered with nonsense.
        """
        argv = (
            ["/bin/sh", "-c", self.handler.command]
            if self.handler.args is None
            else [self.handler.command, *self.handler.args]
        )
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.folder,
            env=os.environ | {"CLAUDE_PROJECT_DIR": str(self.folder.absolute())},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self.handler.timeout):
                out, err = await process.communicate(json.dumps(seen, ensure_ascii=False).encode())
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it, and everything that it has started
            await process.communicate()  # which ends at once now
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"it took longer than {self.handler.timeout:g} s") from None
            raise
        return answer(process.returncode or 0, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def answer(code: int, out: str, err: str) -> Verdict:
    """What a command said, by the rules of settings files: 2 denies, JSON decides, anything else is a failure.

    Raises:
        ValueError: it failed, or its JSON is none.
    """
    if code == 2:
        return Verdict("deny", err.strip()[:1000] or "a hook denies it")
    text = out.strip()
    if code and not text.startswith("{"):
        raise ValueError(f"it ended with exit code {code}" + (f": {err.strip()[:500]}" if err.strip() else ""))
    if not text.startswith(("{", "[")):
        return Verdict()  # plain text, or nothing, is no objection
    plain = json.loads(text)
    if not isinstance(plain, dict) or (plain and not plain.keys() & ANSWER_FIELDS):
        raise ValueError(f"its answer is none: {text[:200]}")
    special = plain.get("hookSpecificOutput")
    special = special if isinstance(special, dict) else {}
    if plain.get("continue") is False:
        return Verdict("deny", str(plain.get("stopReason") or "a hook stops here"))
    decision = special.get("decision")
    said = special.get("permissionDecision") or (decision.get("behavior") if isinstance(decision, dict) else None)
    said = said or {"block": "deny", "approve": "allow"}.get(str(plain.get("decision")))
    said = {"defer": "ask", None: "none"}.get(said, said)
    updated = special.get("updatedInput") or (decision.get("updatedInput") if isinstance(decision, dict) else None)
    if said not in STRENGTH or not (updated is None or isinstance(updated, dict)):
        raise ValueError(f"its answer is none: {text[:200]}")
    reason = special.get("permissionDecisionReason") or plain.get("reason") or ""
    return Verdict(cast(Behavior, said), str(reason)[:1000], updated)
