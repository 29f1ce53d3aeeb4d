"""A tool of a configured MCP server as the target of a call: reached over a session, looked up by a query."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jmespath
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from miniharness.engine import Json
from miniharness.errors import Misdeclared, ToolUnavailable, UsageError
from miniharness.mcp.child import Child
from miniharness.mcp.declared import Declaration, DeclaredTool, LookUp, Query
from miniharness.mcp.session import CallFailed, Session, http_session, stdio_session, text_of
from miniharness.mcp.wire import Limits
from miniharness.tools import config, outcome, references
from miniharness.tools.target import Target

if TYPE_CHECKING:
    from mcp.types import CallToolResult


def find(settings: config.Config, full_name: str) -> Target:
    """The tool that `SERVER.TOOL` names.

    Raises:
        UsageError: the name or the server cannot be used.
    """
    name, dot, tool = full_name.partition(".")
    if not (name and dot and tool):
        raise UsageError(f"{full_name!a} must be SERVER.TOOL, with a server of {settings.folder / config.SERVERS}")
    server, declared = settings.server(name), settings.tool(name, tool)
    return Target(name, tool, declared, server.identity, lambda: _reached(server, tool, declared))


@asynccontextmanager
async def _reached(server: config.Server, name: str, declared: config.Tool) -> AsyncIterator[ServerTool]:
    async with session_for(server, declared.timeout) as session:
        await session.connect({})
        yield ServerTool(server.name, name, declared, session)


def session_for(server: config.Server, timeout_s: float, child: Child | None = None) -> Session:
    """A session with that server; our own starts now, unless it is `child`, which has been started."""
    limits = Limits(read_s=timeout_s)
    if server.url:
        return http_session(server.url, server.headers, limits)
    child = child or Child(server.command, server.env)
    return stdio_session(child, limits, "legacy")  # some hang on a newer greeting


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of a connected server."""

    server: str
    name: str
    declared: config.Tool
    session: Session

    @property
    def definition(self) -> Json:
        """What the server says of the tool.

        Raises:
            ToolUnavailable: it is broken.
            UsageError: it is not there.
        """
        return self._definition(self.name)

    @property
    def pinned(self) -> dict[str, Json]:
        """What the server says of the tool and of the one that looks it up."""
        look_up = self.declared.look_up
        names = [self.name, look_up.tool] if look_up else [self.name]
        return {f"{self.server}.{name}": self._definition(name) for name in names}

    def _definition(self, name: str) -> Json:
        if name not in self.session.tools:
            known = ", ".join(sorted(self.session.tools)) or "none"
            raise UsageError(f"the server {self.server} offers no tool {name}; it offers: {known}")
        return self.session.tool(name).model_dump(mode="json", by_alias=True, exclude_none=True)

    def check(self, arguments: Json) -> None:
        """Check the arguments, the operation key filled in, against the tool's input schema.

        Raises:
            ToolUnavailable: the schema is broken, or does not know the argument for the operation key.
            UsageError: the arguments break it.
        """
        declared, full = self.declared, f"{self.server}.{self.name}"
        if declared.outcome:
            outcome.check(self.session.tool(self.name))
        schema = self.session.tool(self.name).input_schema
        if declared.key and declared.key not in schema.get("properties", {}):
            raise Misdeclared(f"{full} has no argument {declared.key!a} for the operation key (tools.{full}.key)")
        if unknown := references.named([declared.model_dump()]) - schema.get("properties", {}).keys():
            raise UsageError(f"harness.toml: $args.{min(unknown)} is no argument of {full}")
        _check(schema, self.sent("key", arguments), full)

    def sent(self, key: str, arguments: Json) -> Json:
        """The arguments as they go to the server."""
        return {**arguments, self.declared.key: key} if self.declared.key else arguments

    def port(self, action: Json, compared: frozenset[str]) -> DeclaredTool:
        """The tool for the engine, for the one run with this action; `compared` are the fields of its goal."""
        declared = self.declared
        look_up: LookUp | None = query(declared.look_up, action, compared) if declared.look_up else None
        clean: list[str | config.ToolError] = list(declared.clean_errors)
        if declared.outcome:
            look_up, clean = outcome.query(self.name, compared), [*clean, *outcome.CLEAN]
        return DeclaredTool(
            self.session,
            Declaration(
                tool=self.name,
                arguments=self.sent,
                look_up=look_up,
                needs={},
                clean=partial(_is_one_of, clean),
                read=whole(self.session, self.name),
                fences=declared.fenced,
            ),
        )

    async def read(self, arguments: Json) -> Any:
        """Ask a tool that only reads.

        Raises:
            ToolUnavailable: it gave no usable answer.
        """
        try:
            return await self.session.call(self.name, arguments, whole(self.session, self.name), {})
        except CallFailed as error:
            raise ToolUnavailable(f"{self.server}.{self.name}: {error.reason}") from error

    async def is_lost(self) -> bool:
        """Whether our own server has died, so that another one can be started."""
        return await self.session.dies()


def _check(schema: Mapping[str, Any], arguments: Json, name: str) -> None:
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ToolUnavailable(f"{name} is set aside: its input schema is broken: {error.message[:200]}") from error
    known = schema.get("properties", {}).keys()
    if "additionalProperties" not in schema and (unknown := sorted(arguments.keys() - known)):  # it would be dropped
        raise UsageError(f"{name} has no argument {', '.join(unknown)}; it has: {', '.join(sorted(known)) or 'none'}")
    if faults := sorted(Draft202012Validator(schema).iter_errors(arguments), key=lambda e: e.json_path):
        told = "; ".join(f"{fault.json_path}: {fault.message[:200]}" for fault in faults[:5])
        raise UsageError(f"--args do not fit {name}: {told}")


def query(look_up: config.LookUp, action: Json, compared: frozenset[str]) -> Query:
    """The declared look-up of the write with this action; `compared` are the fields of its goal."""

    def arguments(key: str) -> Json:
        filled: Json = references.filled(look_up.arguments, references.known(key, action))
        return filled

    def read(key: str, result: CallToolResult) -> Json | None:
        found = answer(look_up, key, action, result)
        if isinstance(found, int | float) and not isinstance(found, bool):  # 0 must be neither there nor absent
            raise ValueError(f"`found` gives the number {found}; it must give the resource, or nothing")
        if found in (None, False, "", [], {}):  # what JMESPath itself holds for false
            return None
        fields = _search(look_up.fields, found, key, action)
        if not isinstance(fields, dict):
            raise ValueError("the look-up's fields are no object")
        named = _search(look_up.id, found, key, action) if isinstance(found, dict) else None
        return {"id": named, "action": {field: fields[field] for field in fields.keys() & compared}}

    return Query(look_up.tool, arguments, read, partial(_is_one_of, look_up.absent))


def answer(look_up: config.LookUp, key: str, action: Json, result: CallToolResult) -> Any:
    """What `found` gives of an answer to the look-up.

    Raises:
        ValueError: the answer has not what `found` needs.
    """
    content, leading = _content(result, look_up), references.leading_field(look_up.found)
    if leading and not (isinstance(content, dict) and leading in content):  # a typo must not look like an absence
        raise ValueError(f"it has no field {leading!a}, which `found` begins with")
    return _search(look_up.found, content, key, action)


def _search(expression: str, value: Any, key: str, action: Json) -> Any:
    return jmespath.search(references.with_literals(expression, references.known(key, action)), value)


def _content(result: CallToolResult, look_up: config.LookUp) -> Any:
    if look_up.reads == "structured":
        if result.structured_content is None:
            raise ValueError('it has no structured content; set reads = "json" or "text"')
        return result.structured_content
    text = text_of(result)
    if look_up.reads == "json":
        return json.loads(text)
    if look_up.valid and not re.search(look_up.valid, text):
        raise ValueError("its text does not match `valid`")
    return [row.groupdict() for row in re.finditer(look_up.rows, text)] if look_up.rows else text


def whole(session: Session, name: str) -> Callable[[CallToolResult], Any]:
    """Reads an answer of that tool; one that breaks the tool's own output schema is not whole."""
    schema = session.tool(name).output_schema
    validator = Draft202012Validator(schema) if schema else None

    def read(result: CallToolResult) -> Any:
        if validator and not validator.is_valid(result.structured_content):
            raise ValueError("the structured content breaks the tool's output schema")
        content = result.structured_content
        return content if content is not None else text_of(result)

    return read


def _is_one_of(declared: Sequence[str | config.ToolError], error: Json) -> bool:
    return any(_matches(known, error) for known in declared)


def _matches(known: str | config.ToolError, error: Json) -> bool:
    code, message = error.get("code"), error.get("message")
    if isinstance(known, str) or known.code is not None:
        return code == (known if isinstance(known, str) else known.code)
    return isinstance(message, str) and bool(re.search(known.message or "", message))
