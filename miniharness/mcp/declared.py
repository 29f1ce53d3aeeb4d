"""A declared MCP tool as the engine's one tool: a write, and the query that tells what became of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pydantic import BaseModel

from miniharness.engine import Answer, Json
from miniharness.errors import CannotTell, ToolUnavailable
from miniharness.machine import Outcome
from miniharness.mcp.session import CallFailed, Session
from miniharness.mcp.wire import EPOCH_META, KEY_META

if TYPE_CHECKING:
    from mcp.types import CallToolResult

LookUp = Callable[[Session, str, int], Awaitable[Json | None]]
"""Asks a server for the resource `{"id", "action"}` of an operation key, or None; the epoch is of who asks.

Raises:
    CallFailed, ToolUnavailable: there was no usable answer.
"""


@dataclass(frozen=True, slots=True)
class Query:
    """Looks a resource up by a tool.

    `arguments` makes the arguments of an operation key. `read` returns the resource `{"id", "action"}` that an answer
    shows for the key, or None when it is not there; it raises `ValueError` when the answer does not say. `absent` tells
    whether an error of the tool says that it is not there.
    """

    tool: str
    arguments: Callable[[str], Json]
    read: Callable[[str, CallToolResult], Json | None]
    absent: Callable[[Json], bool] = lambda error: False

    async def __call__(self, session: Session, key: str, epoch: int) -> Json | None:
        """As `LookUp` has it."""
        try:
            return await session.call(self.tool, self.arguments(key), partial(self.read, key), _meta(key, epoch))
        except CallFailed as error:
            if self.absent(error.error):
                return None
            raise


def _meta(key: str, epoch: int) -> Json:
    return {EPOCH_META: epoch, KEY_META: key}


@dataclass(frozen=True, slots=True)
class Declaration:
    """What the operator declares of a write tool.

    `arguments` makes its arguments of the operation key and the action. `needs` are the arguments that each tool must
    require, so that none is dropped in silence. `clean` tells whether a structured error says that the write certainly
    did not happen; every other error may hide an effect. `read` raises `ValueError` for an answer that is not whole.
    Where the server does not fence, our own is ended when a write takes too long.
    """

    tool: str
    arguments: Callable[[str, Json], Json]
    look_up: LookUp | None
    needs: Mapping[str, frozenset[str]]
    clean: Callable[[Json], bool]
    read: Callable[[CallToolResult], object]
    fences: bool = True


def keyed(
    *, look_up: str, write: str, noun: str, fields: frozenset[str], answer: type[BaseModel], clean: frozenset[str]
) -> Declaration:
    """A pair of tools that both take the key as `operation_key`, and answer with `answer`.

    Its one field `noun` is null or holds `id` and `action`; `clean` are the codes of the clean errors.
    """

    def read(result: CallToolResult) -> Json | None:
        found: Json | None = answer.model_validate(result.structured_content).model_dump(mode="json")[noun]
        return found

    key = frozenset({"operation_key"})
    return Declaration(
        tool=write,
        arguments=lambda op, action: {"operation_key": op, **action},
        look_up=Query(look_up, lambda op: {"operation_key": op}, lambda op, result: read(result)),
        needs={look_up: key, write: key | fields},
        clean=lambda error: error.get("code") in clean,
        read=read,
    )


class DeclaredTool:
    """The tool port of the engine over a session and a declaration."""

    def __init__(self, session: Session, declared: Declaration) -> None:
        self.session = session
        self._declared = declared

    async def connect(self) -> Json:
        """Shake hands and find the tools.

        Raises:
            ToolUnavailable: within the session's limits, with the reason.
        """
        return await self.session.connect(self._declared.needs)

    async def look_up(self, key: str, epoch: int) -> Json | None:
        """The resource of that key; a fencing server refuses every write older than `epoch` from now on.

        Raises:
            CannotTell: there is no look-up for this tool.
            ToolUnavailable: there was no usable answer.
        """
        query = self._declared.look_up
        if self.session.dead:
            raise ToolUnavailable("the server is gone")
        if query is None:
            raise CannotTell
        try:
            return await query(self.session, key, epoch)
        except CallFailed as error:
            said = f"{self._declared.tool} could not be looked up ({error.reason}); nothing was decided"
            raise ToolUnavailable(said) from error

    async def dispatch(self, key: str, action: Json, epoch: int) -> Answer:
        """Write, once; whatever comes back, only a look-up will tell."""
        declared = self._declared
        try:
            arguments = declared.arguments(key, action)
            await self.session.call(declared.tool, arguments, declared.read, _meta(key, epoch))
        except CallFailed as error:
            if error.late and not declared.fences:
                self.session.end(f"{declared.tool} took too long, and must not take effect later")
            if not error.sent:
                return Answer(Outcome.UNSENT, error.reason)
            return Answer(Outcome.REFUSED if declared.clean(error.error) else Outcome.UNKNOWN, error.reason)
        return Answer(Outcome.RETURNED)
