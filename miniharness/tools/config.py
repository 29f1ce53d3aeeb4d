"""What the operator declares: where the servers are (`.mcp.json`), and what MCP cannot say of a tool (`harness.toml`).

Reads files and the environment; knows no session and no run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jmespath
from jmespath.exceptions import JMESPathError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from miniharness.contract import canonical, digest
from miniharness.errors import UsageError
from miniharness.tools import references

SERVERS, TOOLS = ".mcp.json", "harness.toml"
SETTINGS = (".claude/settings.json", ".claude/settings.local.json")
RESERVED = {"run", "state", "reason", "certain", "attempts", "budget", "proposal", "metadata", "events", "next"}
RESERVED |= {"interrupted", "line"}
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
WHEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*(>=|<=|==|!=|>|<)\s*(-?[0-9]+(?:\.[0-9]+)?)\s*")


def _expression(text: str) -> str:
    try:
        jmespath.compile(references.with_literals(text, lambda name: ""))
    except JMESPathError as error:
        raise ValueError(f"is not a JMESPath expression: {str(error).splitlines()[0]}") from None
    return text


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return text


def _pattern_of_rows(text: str) -> str:
    if not re.compile(_pattern(text)).groupindex:
        raise ValueError("needs named groups, the fields of a row: (?P<name>...)")
    return text


def _comparison(text: str) -> str:
    if not WHEN.fullmatch(text):
        raise ValueError('must be a comparison like "amount > 1000"')
    return text


def _noun(text: str) -> str:
    if text in RESERVED or not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", text):
        raise ValueError(
            f"must be 1 to 32 of a-z 0-9 _, begin with a letter, and be none of {', '.join(sorted(RESERVED))}"
        )
    return text


Risk = Literal["read", "side-effect", "destructive"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ToolError(_Strict):
    """An error that a tool reports, told by the code of the structured error or by its message."""

    code: Annotated[str, Field(min_length=1)] | None = None
    message: Annotated[str, Field(min_length=1), AfterValidator(_pattern)] | None = None

    @model_validator(mode="after")
    def _one(self) -> ToolError:
        if (self.code is None) == (self.message is None):
            raise ValueError("needs either code or message, a regular expression")
        return self


class LookUp(_Strict):
    """The query that tells whether the resource is there.

    In `arguments` and in the expressions `$key` is the operation key, `$args.NAME` an argument of the write.
    """

    tool: str
    arguments: dict[str, Any] = {}
    reads: Literal["structured", "text", "json"] = "structured"
    """What of the answer: its structured content, its text, or the JSON in its text."""
    valid: Annotated[str, AfterValidator(_pattern)] | None = None
    """A regular expression that a text matches if it is an answer; anything else decides nothing."""
    rows: Annotated[str, AfterValidator(_pattern_of_rows)] | None = None
    """A regular expression with named groups: the text is read as the list of what it finds, an object for each."""
    absent: list[str | ToolError] = []
    """Errors of this tool which mean that the resource is not there; every other decides nothing."""
    found: Annotated[str, AfterValidator(_expression)] = "@"
    """JMESPath over it: the resource, or something empty or false when it is absent."""
    fields: Annotated[str, AfterValidator(_expression)] = "@"
    """JMESPath over the resource: the object whose fields are compared with the goal."""
    id: Annotated[str, AfterValidator(_expression)] = "id"
    """JMESPath over the resource: what names it, for people."""

    @model_validator(mode="after")
    def _of_text(self) -> LookUp:
        if self.reads != "text" and (self.valid or self.rows):
            raise ValueError('valid and rows need reads = "text"')
        return self


class Tool(_Strict):
    """What the operator knows of a tool. A tool that is not declared is `manual`."""

    recovery: Literal["read", "idempotent", "keyed", "lookup", "manual"]
    """`read`: it changes nothing. `idempotent`: a second call with equal arguments has no second effect. `keyed`: the
    server de-duplicates on a key. `lookup`: only the query tells. `manual`: nobody can tell."""
    key: str | None = None
    """The argument that carries the operation key; the engine fills it, nobody else."""
    look_up: LookUp | None = None
    outcome: bool = False
    """The server keeps docs/recoverable-tools.md: it takes the key in `_meta`, tells the outcome, and fences."""
    fences: bool = False
    """A look-up that carries a higher `io.github.miniharness/epoch` makes the server refuse every older write."""
    settles_after: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Seconds after which a write that was sent can no longer land; with it an absent becomes conclusive in the end."""
    clean_errors: list[str | ToolError] = []
    """Errors that certainly changed nothing: codes, or `{ message = "regular expression" }`. Every other is unknown."""
    expect: dict[str, Any] | None = None
    """The goal of a call without `--expect`; `$args.NAME` as in `look_up`. Default: the arguments."""
    timeout: float = Field(default=30.0, gt=0, le=3600, allow_inf_nan=False)
    """Seconds for one call. A write that took longer is unknown, not failed."""
    concurrent: bool = True
    """Whether calls of it may run at the same time; otherwise each waits, for at most `timeout`, for the one before."""
    paths: dict[str, Literal["read", "edit"]] = {}
    """Arguments that name files, and what is done to them; `Read(...)` and `Edit(...)` rules are about these."""
    shell: str | None = None
    """The argument that is a shell command; `Bash(...)` rules are about it."""
    result_limit: int = Field(default=16_000, ge=1)
    """Bytes of an answer that are shown; the whole is kept by its hash."""
    operation: Literal["arguments", "call"] = "arguments"
    """What is one operation: equal arguments within a run, or each call, which then needs a name of its own."""
    risk: Risk | None = None
    """What no rule names is allowed, asked about, or denied. Default: `read` for a tool that only reads, otherwise
    `side-effect`."""
    resource: Annotated[str, AfterValidator(_noun)] = "resource"
    """What one operation makes, in one word; the last part of the operation key."""

    @model_validator(mode="after")
    def _whole(self) -> Tool:
        if self.recovery == "keyed" and not (self.outcome or (self.key and self.look_up)):
            raise ValueError(
                'recovery = "keyed" needs outcome, or key, the argument for the operation key, and look_up'
            )
        if self.outcome and (self.recovery != "keyed" or self.look_up):
            raise ValueError('outcome is for recovery = "keyed" without look_up: the outcome method is the look-up')
        if self.recovery == "lookup" and not self.look_up:
            raise ValueError('recovery = "lookup" needs look_up')
        if self.recovery in ("read", "manual") and (self.look_up or self.key or self.fences):
            raise ValueError(f'recovery = "{self.recovery}" takes no key, look_up or fences')
        if self.risk == "read" and self.recovery != "read":
            raise ValueError('risk = "read" is for recovery = "read"; a tool that writes is never allowed by default')
        if self.fences and not (self.look_up or self.outcome):
            raise ValueError("fences needs look_up: a look-up raises the fence")
        return self

    @property
    def danger(self) -> Risk:
        """Its risk, as declared or by default."""
        return self.risk or ("read" if self.recovery == "read" else "side-effect")

    @property
    def asked(self) -> str:
        """Who is asked what became of a write: the look-up's tool, or the outcome method; empty: nobody can be."""
        return "outcome" if self.outcome else self.look_up.tool if self.look_up else ""

    @property
    def fenced(self) -> bool:
        """Whether a look-up makes the server refuse every older write."""
        return self.fences or self.outcome

    @property
    def deduplicates(self) -> bool:
        """Whether a second call has no second effect."""
        return self.recovery in ("keyed", "idempotent")


class Example(_Strict):
    """A call that a rule must match, or must not."""

    tool: str | None = None
    """Default: the rule's own name."""
    args: dict[str, Any] = {}
    paths: dict[str, Literal["read", "edit"]] = {}
    """Files, and what is done to them."""


class RuleEntry(_Strict):
    """A rule with a comparison or with examples, which are tried whenever the file is read."""

    rule: str
    when: Annotated[str, AfterValidator(_comparison)] | None = None
    """A comparison with a number: `amount > 1000`."""
    match: list[Example] = []
    not_match: list[Example] = []


class RuleLists(_Strict):
    """The table `[rules]`."""

    allow: list[str | RuleEntry] = []
    ask: list[str | RuleEntry] = []
    deny: list[str | RuleEntry] = []


class Limits(_Strict):
    """The table `[limits]`, for calls within an agent's run."""

    calls_per_run: int | None = Field(default=200, ge=1)
    """How many calls it makes in all; a write that goes on is counted once."""
    block_repeats: bool = True
    """Whether a read that only repeats the last call is denied. One that failed may be made again, once."""


class Approvals(_Strict):
    """The table `[approvals]`."""

    by: list[str] = []
    """Who may answer; empty: whoever can write to the state folder."""
    days: float = Field(default=7.0, gt=0, le=366)
    """How long a question and its answer hold."""


class Harness(_Strict):
    """`harness.toml`: `[tools.SERVER.TOOL]` for each tool of which something is known, and what is allowed."""

    tools: dict[str, dict[str, Tool]] = {}
    rules: RuleLists = RuleLists()
    approvals: Approvals = Approvals()
    limits: Limits = Limits()
    hooks: dict[str, Any] = {}
    """By event, as in settings files; `on_failure = "allow"` makes a hook optional."""


MANUAL = Tool(recovery="manual")


@dataclass(frozen=True, slots=True)
class Server:
    """One entry of `.mcp.json`, its variables filled in; `problem` says why it cannot be used."""

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""  # of the entry as it is written, without what the variables hold
    problem: str = ""

    @property
    def identity(self) -> str:
        """Names where the writes go, for the contract."""
        return f"{self.name}@{self.digest[:12]}"


@dataclass(frozen=True, slots=True)
class Settings:
    """One settings file as it is; `fault` says why it cannot be read."""

    path: Path
    text: str = ""
    plain: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""

    def part(self, name: str) -> dict[str, Any]:
        """The object of that name; empty when there is none.

        Raises:
            UsageError: it is no object, or the file cannot be read.
        """
        if self.fault:
            raise UsageError(self.fault)
        return _part(self.path, self.plain, name)


@dataclass(frozen=True, slots=True)
class Config:
    """What the files of a folder say, each read once: servers, `harness.toml` with its text, and settings files."""

    folder: Path
    servers: Mapping[str, Server]
    text: str
    harness: Harness
    settings: tuple[Settings, ...]

    @property
    def tools(self) -> Mapping[str, Mapping[str, Tool]]:
        """What is declared of the tools of each server."""
        return self.harness.tools

    @property
    def problems(self) -> list[str]:
        """What keeps servers and tools from being used."""
        found = [] if self.servers else [f"{self.folder.absolute()} has no {SERVERS} with servers"]
        for server in self.servers.values():
            if server.problem:
                found.append(f"mcpServers.{server.name}: {server.problem}")
            elif server.command and not shutil.which(server.command[0], path=server.env.get("PATH")):
                found.append(f"mcpServers.{server.name}: there is no program {server.command[0]!a}")
        return found + [f"tools.{name}: there is no such server" for name in self.tools if name not in self.servers]

    def server(self, name: str) -> Server:
        """The server of that name.

        Raises:
            UsageError: there is none, or it cannot be used.
        """
        if not self.servers:
            raise UsageError(
                f"{self.folder.absolute()} has no {SERVERS} with servers; name its folder with --config DIR"
            )
        if name not in self.servers:
            known = ", ".join(sorted(self.servers)) or "none"
            raise UsageError(f"{self.folder / SERVERS} has no server {name!a}; it has: {known}")
        server = self.servers[name]
        if server.problem:
            raise UsageError(f"{self.folder / SERVERS}: mcpServers.{name}: {server.problem}")
        return server

    def tool(self, server: str, name: str) -> Tool:
        """What is declared of the tool; an undeclared one is manual."""
        return self.tools.get(server, {}).get(name, MANUAL)


def load(folder: Path) -> Config:
    """Read the files of `folder`; each may be missing. A settings file that cannot be read is kept with its fault.

    Raises:
        UsageError: `.mcp.json` or `harness.toml` is not what it should be; names file, line and field.
    """
    servers = _part(folder / SERVERS, _object(folder / SERVERS, _text(folder / SERVERS)), "mcpServers")
    text = _text(folder / TOOLS)
    return Config(
        folder=folder,
        servers={name: _server(name, entry) for name, entry in servers.items()},
        text=text,
        harness=_harness(folder / TOOLS, text),
        settings=tuple(_settings(folder / name) for name in SETTINGS),
    )


def _settings(path: Path) -> Settings:
    try:
        text = _text(path)
        return Settings(path, text, _object(path, text))
    except UsageError as error:
        return Settings(path, fault=str(error))


def _harness(path: Path, text: str) -> Harness:
    try:
        return Harness.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from None
    except ValidationError as error:
        faults = [f"{path}:{_line(text, e['loc'])}: {'.'.join(map(str, e['loc']))}: {_said(e)}" for e in error.errors()]
        raise UsageError("\n".join(faults)) from None


def _said(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "extra_forbidden":
        return "there is no such field"
    return str(fault["msg"]).removeprefix("Value error, ")


def _line(text: str, location: tuple[int | str, ...]) -> int:
    """The line of the table or key that is nearest to `location`."""
    best, depth = 1, 0
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.fullmatch(r"\s*\[([^\[\]]+)\]\s*(#.*)?", line):
            table = tuple(part.strip().strip("\"'") for part in header[1].split("."))
            path: tuple[str, ...] = table
        elif key := re.match(r"\s*([A-Za-z0-9_\"'-]+)\s*=", line):
            path = (*table, key[1].strip("\"'"))
        else:
            continue
        if len(path) > depth and path == tuple(map(str, location[: len(path)])):
            best, depth = number, len(path)
    return best


def _server(name: str, entry: Any) -> Server:
    """One entry; what is wrong with it sets this server aside and no other."""
    if not isinstance(entry, dict):
        return Server(name, problem="it must be an object")
    kind = entry.get("type", "stdio")
    missing: set[str] = set()
    filled = _expanded({k: entry[k] for k in ("command", "args", "env", "url", "headers") if k in entry}, missing)
    told = partial(Server, name, digest=digest(canonical(entry)))
    if kind not in ("stdio", "http", "streamable-http"):
        return told(problem=f"its type {kind!a} is not supported; supported are stdio and http")
    if missing:
        return told(problem=f"the environment has no {', '.join(sorted(missing))}")
    command, args, env = filled.get("command", ""), filled.get("args", []), filled.get("env", {})
    url, headers = filled.get("url", ""), filled.get("headers", {})
    texts = [command, url, *(args if isinstance(args, list) else [0])]
    texts += [*env.values(), *headers.values()] if isinstance(env, dict) and isinstance(headers, dict) else [0]
    if not all(isinstance(text, str) for text in texts):
        return told(problem="command and url must be text, args a list of text, env and headers text by name")
    if kind == "stdio":
        return told(command=(command, *args), env=env, problem="" if command else "it has no command")
    return told(url=url, headers=headers, problem="" if url else "it has no url")


def _expanded(value: Any, missing: set[str]) -> Any:
    """`value` with `${VAR}` and `${VAR:-default}` filled in everywhere; names without a value go to `missing`."""
    if isinstance(value, str):
        return VARIABLE.sub(lambda found: _variable(found, missing), value)
    if isinstance(value, list):
        return [_expanded(item, missing) for item in value]
    return {k: _expanded(item, missing) for k, item in value.items()} if isinstance(value, dict) else value


def _variable(found: re.Match[str], missing: set[str]) -> str:
    name, default = found.groups()
    if name not in os.environ and default is None:
        missing.add(name)
    return os.environ.get(name) or default or ""


def _object(path: Path, text: str) -> dict[str, Any]:
    try:
        plain = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: it is not JSON: {error.msg}") from None
    except RecursionError:
        raise UsageError(f"{path}: it is nested too deeply") from None
    if not isinstance(plain, dict):
        raise UsageError(f'{path}: it must be an object like {{"name": {{...}}}}')
    return plain


def _part(path: Path, plain: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = plain.get(name, {})
    if not isinstance(found, dict):
        raise UsageError(f'{path}: it must be an object like {{"{name}": {{...}}}}')
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: it cannot be read: {error}") from None
