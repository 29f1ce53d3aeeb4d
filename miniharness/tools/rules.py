"""What may be called: allow, ask and deny rules, from the files that people have and from `harness.toml`.

Deny comes before ask and ask before allow; specificity never matters; what no rule names is asked about. Knows no run.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import translate
from pathlib import Path
from typing import Any

from miniharness.contract import canonical, digest
from miniharness.errors import UsageError
from miniharness.tools import shell
from miniharness.tools.config import TOOLS, WHEN, Config, Example, Risk, RuleEntry, Settings
from miniharness.tools.paths import Access, PathRule

RULE = re.compile(r"([A-Za-z0-9_.*-]+)(?:\((.*)\))?", re.DOTALL)
COMPARED: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
SETTINGS_READ = {"$schema", "permissions", "hooks"}
FILE_TOOLS: dict[str, Access] = {"Read": "read", "Edit": "edit"}


class Behavior(StrEnum):
    """What a rule says, strongest first."""

    DENY = "deny"
    ASK = "ask"
    ALLOW = "allow"


UNNAMED: dict[Risk, tuple[Behavior, str]] = {
    "read": (Behavior.ALLOW, "it only reads"),
    "side-effect": (Behavior.ASK, "no rule names it"),
    "destructive": (Behavior.DENY, "it is destructive and no rule names it"),
}
"""What is done with a call that no rule names."""


@dataclass(frozen=True, slots=True)
class Call:
    """What is about to be called. `paths` are the arguments that name files, and what is done to them."""

    tool: str  # mcp__SERVER__TOOL
    arguments: Mapping[str, Any]
    paths: tuple[tuple[Access, str], ...] = ()
    shell: shell.Script | None = None

    @classmethod
    def of_shell(cls, tool: str, command: str, arguments: Mapping[str, Any]) -> Call:
        """A call that runs a shell command; what it reads and writes counts as paths."""
        script = shell.read(command)
        reads: Iterator[tuple[Access, str]] = (("read", path) for path in script.reads)
        writes: Iterator[tuple[Access, str]] = (("edit", path) for path in script.writes if path is not None)
        return cls(tool, arguments, (*reads, *writes), script)


@dataclass(slots=True)
class AllowedShell:
    """What all allow rules together let a shell do."""

    commands: list[Sequence[str]] = field(default_factory=list)
    edits: list[PathRule] = field(default_factory=list)

    def covers(self, script: shell.Script) -> bool:
        """Whether each command, and each file that is written, is allowed by one of them."""
        written = [path for path in script.writes if path is not None]
        edited = all(any(rule.matches(path) for rule in self.edits) for path in written)
        return edited and shell.allowed(script, self.commands)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule as it was written, and where."""

    behavior: Behavior
    text: str
    source: str  # FILE:LINE
    matches: Callable[[Call], bool]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rules say of a call; `rule` decided it, `following` would have decided it without that one."""

    behavior: Behavior
    reason: str
    rule: Rule | None = None
    following: Rule | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules of a folder. `unsupported` names what is not applied, `broken` why every write is denied."""

    rules: Sequence[Rule]
    unsupported: Sequence[str] = ()
    broken: Sequence[str] = ()

    def decide(self, call: Call, risk: Risk = "side-effect") -> Decision:
        """What is to be done with the call; where no rule names it, its risk decides."""
        if self.broken and risk != "read":
            return Decision(Behavior.DENY, f"a rule file cannot be read, so every write is denied: {self.broken[0]}")
        matching = [
            rule for behavior in Behavior for rule in self.rules if rule.behavior is behavior if rule.matches(call)
        ]
        if not matching:
            return Decision(*UNNAMED[risk])
        rule = matching[0]
        return Decision(
            rule.behavior, f"{rule.behavior} {rule.text} ({rule.source})", rule, next(iter(matching[1:]), None)
        )

    @property
    def digest(self) -> str:
        """Names these rules: equal digests decide alike."""
        return digest(canonical([[rule.behavior, rule.text] for rule in self.rules] + [list(self.broken)]))


@dataclass(slots=True)
class _Reading:
    """What is gathered while the files of a folder are read."""

    folder: Path
    unsupported: list[str] = field(default_factory=list)
    allowed: AllowedShell = field(default_factory=AllowedShell)


def load(config: Config) -> Rules:
    """The rules of a folder: `.claude/settings.json`, `.claude/settings.local.json` and `harness.toml`, merged.

    A file that cannot be read denies every write; a rule of ours that fails its own examples is an error.

    Raises:
        UsageError: an example in harness.toml does not do what it says.
    """
    rules: list[Rule] = []
    broken: list[str] = []
    reading = _Reading(config.folder)
    for settings in config.settings:
        try:
            rules += _of_settings(settings, reading)
        except UsageError as error:
            broken.append(str(error))
    rules += _of_harness(config, reading)
    return Rules(rules, reading.unsupported, broken)


def _of_settings(settings: Settings, reading: _Reading) -> Iterator[Rule]:
    path, permissions = settings.path, settings.part("permissions")
    reading.unsupported += [f"{path}: {name}" for name in settings.plain if name not in SETTINGS_READ]
    reading.unsupported += [f"{path}: permissions.{name}" for name in permissions if name not in set(Behavior)]
    for behavior in Behavior:
        entries = permissions.get(behavior.value, [])
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise UsageError(f"{path}: permissions.{behavior} must be a list of text")
        for entry in entries:
            source = f"{path}:{_line_with(settings.text, entry)}"
            yield from _made(behavior, RuleEntry(rule=entry), source, reading)


def _line_with(text: str, entry: str) -> int:
    quoted = json.dumps(entry, ensure_ascii=False)
    return next((n for n, line in enumerate(text.splitlines(), start=1) if quoted in line), 1)


def _of_harness(config: Config, reading: _Reading) -> Iterator[Rule]:
    for behavior in Behavior:
        for given in getattr(config.harness.rules, behavior.value):
            entry = RuleEntry(rule=given) if isinstance(given, str) else given
            source = f"{config.folder / TOOLS}:{_line_with(config.text, entry.rule)}"
            for rule in _made(behavior, entry, source, reading):
                _try_examples(rule, entry)
                yield rule


def _try_examples(rule: Rule, entry: RuleEntry) -> None:
    for wanted, examples in ((True, entry.match), (False, entry.not_match)):
        for example in examples:
            if rule.matches(_call_of(entry, example)) is not wanted:
                told = "does not match" if wanted else "matches"
                raise UsageError(f"{rule.source}: the rule {rule.text!a} {told} its example {example.model_dump()}")


def _call_of(entry: RuleEntry, example: Example) -> Call:
    name = example.tool or entry.rule.partition("(")[0]
    return Call(name, example.args, tuple((access, path) for path, access in example.paths.items()))


def _made(behavior: Behavior, entry: RuleEntry, source: str, reading: _Reading) -> Iterator[Rule]:
    """The rule of one entry; one that cannot be applied is named instead."""
    parsed = RULE.fullmatch(entry.rule.strip())
    if not parsed:
        reading.unsupported.append(f"{source}: {entry.rule!a} is no rule")
        return
    name, specifier = parsed.groups()
    conditions: list[Callable[[Call], bool]] = []
    if name in FILE_TOOLS:
        conditions.append(_about_paths(name, specifier or "**", behavior, reading))
    elif name == "Bash":
        conditions.append(_about_shell(shell.pattern(specifier or "*"), behavior, reading.allowed))
    elif not name.startswith("mcp__") and not (set(name) & {"*"}):
        server, dot, tool = name.partition(".")
        hint = f"; write mcp__{server}__{tool}" if dot else ""
        reading.unsupported.append(f"{source}: {entry.rule!a} is about a tool that is not here{hint}")
        return
    elif behavior is Behavior.ALLOW and not _allowable(name):
        reading.unsupported.append(f"{source}: {entry.rule!a} would allow more than one server's tools and is skipped")
        return
    else:
        conditions.append(_named(name))
        if specifier not in (None, "*"):
            parameter, colon, value = specifier.partition(":")
            if not colon or behavior is Behavior.ALLOW:
                reading.unsupported.append(f"{source}: {entry.rule!a}: (param:value) is for deny and ask")
                return
            conditions.append(_has(parameter.strip(), value.strip()))
    if entry.when is not None:
        conditions.append(_compares(entry.when, behavior))
    text = entry.rule if entry.when is None else f"{entry.rule} when {entry.when}"
    yield Rule(behavior, text, source, lambda call: all(condition(call) for condition in conditions))


def _about_paths(tool: str, pattern: str, behavior: Behavior, reading: _Reading) -> Callable[[Call], bool]:
    """A deny or ask fires for any of the paths; an allow must cover all of them, and never a whole shell command."""
    paths = PathRule.of(pattern, reading.folder, denies=behavior is not Behavior.ALLOW)

    def covers(access: Access, path: str) -> bool:
        return _reaches(FILE_TOOLS[tool], behavior, access) and paths.matches(path)

    if behavior is Behavior.ALLOW:
        if tool == "Edit":
            reading.allowed.edits.append(paths)
        return lambda call: call.shell is None and bool(call.paths) and all(covers(*path) for path in call.paths)
    return lambda call: any(covers(*path) for path in call.paths)


def _about_shell(pattern: Sequence[str], behavior: Behavior, allowed: AllowedShell) -> Callable[[Call], bool]:
    """A deny or ask fires for any command in it; the allow rules together must cover everything that it does."""
    if behavior is not Behavior.ALLOW:
        return lambda call: call.shell is not None and shell.denied(call.shell, pattern)
    allowed.commands.append(pattern)
    return lambda call: call.shell is not None and shell.denied(call.shell, pattern) and allowed.covers(call.shell)


def _reaches(rule: Access, behavior: Behavior, access: Access) -> bool:
    """Whether a path rule is about that access; who may not read a file may not edit it either."""
    return rule == access or (rule == "read" and access == "edit" and behavior is not Behavior.ALLOW)


def _allowable(name: str) -> bool:
    """In an allow rule only the tool's part of a name may be open: `mcp__server__*`, never `mcp__*`."""
    server = name.removeprefix("mcp__").partition("__")[0]
    return name.startswith("mcp__") and bool(server) and "*" not in server


def _named(name: str) -> Callable[[Call], bool]:
    """`mcp__server` means all its tools."""
    if re.fullmatch(r"mcp__(?:(?!__)[^*])+", name):
        name += "__*"
    pattern = re.compile(translate(name.replace("[", "[[]").replace("?", "[?]")))
    return lambda call: pattern.match(call.tool) is not None


def _has(parameter: str, value: str) -> Callable[[Call], bool]:
    """A top-level argument with that value, in which `*` stands for anything; one that is omitted never matches."""
    pattern = re.compile(".*".join(map(re.escape, value.split("*"))), re.DOTALL)

    def matches(call: Call) -> bool:
        given = call.arguments.get(parameter)
        if given is None or isinstance(given, dict | list):
            return False
        return pattern.fullmatch(given if isinstance(given, str) else json.dumps(given)) is not None

    return matches


def _compares(when: str, behavior: Behavior) -> Callable[[Call], bool]:
    """`amount > 1000`. What is given and is no number cannot be ruled out: deny and ask take it, allow does not."""
    found = WHEN.fullmatch(when)
    assert found, "checked when it was read"
    parameter, compared, limit = found[1], COMPARED[found[2]], float(found[3])

    def matches(call: Call) -> bool:
        if parameter not in call.arguments:
            return False
        given = call.arguments[parameter]
        if isinstance(given, bool) or not isinstance(given, int | float):
            return behavior is not Behavior.ALLOW
        return compared(given, limit)

    return matches
