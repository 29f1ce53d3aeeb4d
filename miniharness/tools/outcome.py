"""The client's side of docs/recoverable-tools.md: a server's outcome method as the look-up of a write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from miniharness.errors import Misdeclared, ToolUnavailable
from miniharness.mcp.declared import LookUp
from miniharness.mcp.session import CallFailed, Session
from miniharness.mcp.wire import OUTCOME_METHOD, RECOVERABLE, VERSION

if TYPE_CHECKING:
    from mcp.types import Tool

CLEAN = ("invalid", "conflict", "stale", "refused")
"""The codes of errors that certainly changed nothing."""

METHOD_NOT_FOUND = -32601  # JSON-RPC
NEXT = "declare key and look_up for it instead of outcome, or use a server that does"


class Done(BaseModel):
    """What was done under a key."""

    model_config = ConfigDict(strict=True)

    tool: str
    arguments: dict[str, Any]
    result: Any


class Told(BaseModel):
    """The answer of the method. The field must be there, so that an empty answer is no absence."""

    outcome: Done | None


def check(tool: Tool) -> None:
    """Check that the tool says it keeps the contract; over stdio a server can say so nowhere else.

    Raises:
        Misdeclared: it does not, or in a version that is not known here.
    """
    said = (tool.meta or {}).get(RECOVERABLE)
    if not isinstance(said, dict) or said.get("version") != VERSION:
        told = "has no" if said is None else f"speaks another version, {said!r:.80}, than {VERSION} of"
        raise Misdeclared(f"the server's tool {tool.name} {told} {RECOVERABLE} in its _meta; {NEXT}")


def query(tool: str, compared: frozenset[str]) -> LookUp:
    """Looks up what was done under a key: its arguments as they were done, and over them the fields of its result."""

    async def look_up(session: Session, key: str, epoch: int) -> dict[str, Any] | None:
        done = await _ask(session, key, epoch)
        if done is None:
            return None
        if done.tool != tool:
            raise ToolUnavailable(f"operation {key} was done by the tool {done.tool}, not {tool}; use another run id")
        result = done.result if isinstance(done.result, dict) else {}
        known = done.arguments | result
        return {"id": result.get("id", key), "action": {field: known[field] for field in known.keys() & compared}}

    return look_up


async def _ask(session: Session, key: str, epoch: int) -> Done | None:
    from mcp.types import Request

    question = Request[dict[str, Any], str](method=OUTCOME_METHOD, params={"key": key, "epoch": epoch})
    try:
        return (await session.ask(OUTCOME_METHOD, question, Told)).outcome
    except CallFailed as error:
        if getattr(error.__cause__, "code", None) == METHOD_NOT_FOUND:
            said = f"the server does not know the method {OUTCOME_METHOD} of {RECOVERABLE}; {NEXT}"
            raise Misdeclared(said) from error
        raise
