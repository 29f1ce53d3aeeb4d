"""What is called: a tool with what is declared of it, and how it is reached. Knows neither servers nor functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from miniharness import engine
from miniharness.contract import Budget, Contract, Tool
from miniharness.engine import Json
from miniharness.tools import config, references
from miniharness.tools.rules import Call

OPERATOR = "operator"  # who proposes: the person or program that gave the arguments


class Reached(Protocol):
    """A tool that can be called now."""

    @property
    def definition(self) -> Json:
        """The tool as it describes itself.

        Raises:
            ToolUnavailable, UsageError: it is broken or not there.
        """

    @property
    def pinned(self) -> Mapping[str, Json]:
        """What has to be accepted when it changes, by full name: descriptions that somebody else can write."""

    def check(self, arguments: Json) -> None:
        """Check the arguments against the tool's schema.

        Raises:
            ToolUnavailable: the schema cannot be used.
            UsageError: the arguments break it; names each.
        """

    def sent(self, key: str, arguments: Json) -> Json:
        """The arguments as they are sent."""

    def port(self, action: Json, compared: frozenset[str]) -> engine.Tool:
        """The tool for the engine, for the one run with this action; `compared` are the fields of its goal."""

    async def read(self, arguments: Json) -> Any:
        """Ask a tool that only reads.

        Raises:
            ToolUnavailable: it gave no usable answer.
        """

    async def is_lost(self) -> bool:
        """Whether it has died, and can be reached anew."""


@dataclass(frozen=True, slots=True)
class Target:
    """A tool of a server, what is declared of it, and how it is reached."""

    server: str
    name: str
    declared: config.Tool
    identity: str  # of the server, so that a change of it is noticed
    reach: Callable[[], AbstractAsyncContextManager[Reached]]

    @property
    def full_name(self) -> str:
        """`SERVER.TOOL`."""
        return f"{self.server}.{self.name}"

    def call(self, arguments: Json) -> Call:
        """The call as the rules look at it."""
        name, declared = f"mcp__{self.server}__{self.name}", self.declared
        if declared.shell and declared.shell in arguments:
            return Call.of_shell(name, str(arguments[declared.shell]), arguments)
        paths = ((access, arguments[argument]) for argument, access in declared.paths.items() if argument in arguments)
        return Call(name, arguments, tuple((access, str(path)) for access, path in paths))

    def contract(
        self, arguments: Json, expect: Json | None, *, budget: Budget | None, deadline: float | None, command: str
    ) -> Contract:
        """The contract of a call with these arguments."""
        declared = self.declared
        goal = expect or references.filled(declared.expect, references.known("", arguments)) or arguments
        return Contract(
            goal=dict(goal),
            arguments=dict(arguments),
            tool=Tool(
                name=self.full_name,
                resource=declared.resource,
                server=self.identity,
                fences=declared.fenced,
                deduplicates=declared.deduplicates,
                settles_after_s=declared.settles_after,
            ),
            provider=OPERATOR,
            model="none",
            budget=budget or Budget(),
            deadline=deadline,
            command=command,
        )
