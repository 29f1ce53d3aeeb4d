"""A pair of MCP tools as the engine's one tool: a write that takes the operation key, and its look-up by that key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from miniharness.engine import Answer, Json
from miniharness.errors import ToolUnavailable
from miniharness.machine import Outcome
from miniharness.mcp.session import CallFailed, Session
from miniharness.mcp.wire import EPOCH_META, KEY_META


@dataclass(frozen=True, slots=True)
class Pair:
    """The operator's declaration of both tools, which must require `operation_key`.

    Both answer with `answer`, whose one field `noun` is null or holds `id` and `action`. `clean` are the error codes
    with which the server says that a write certainly did not happen; every other error may hide an effect.
    """

    look_up: str
    write: str
    noun: str
    fields: frozenset[str]
    answer: type[BaseModel]
    clean: frozenset[str]


class KeyedTool:
    """The tool port of the engine over a session and a `Pair`."""

    def __init__(self, session: Session, pair: Pair) -> None:
        self.session = session
        self._pair = pair

    async def connect(self) -> Json:
        """Shake hands and find both tools.

        Raises:
            ToolUnavailable: within the session's limits, with the reason.
        """
        key = frozenset({"operation_key"})
        return await self.session.connect({self._pair.look_up: key, self._pair.write: key | self._pair.fields})

    async def look_up(self, key: str, epoch: int) -> Json | None:
        """The resource of that key; a fencing server refuses every write older than `epoch` from now on.

        Raises:
            ToolUnavailable: there was no usable answer.
        """
        try:
            found = await self._call(self._pair.look_up, key, epoch, {})
        except CallFailed as error:
            said = f"the {self._pair.noun} could not be looked up ({error.reason}); nothing was decided"
            raise ToolUnavailable(said) from error
        resource: Json | None = found.model_dump(mode="json")[self._pair.noun]
        return resource

    async def dispatch(self, key: str, action: Json, epoch: int) -> Answer:
        """Write, once; whatever comes back, only a look-up will tell."""
        try:
            await self._call(self._pair.write, key, epoch, action)
        except CallFailed as error:
            if not error.sent:
                return Answer(Outcome.UNSENT, error.reason)
            refused = error.error.get("code") in self._pair.clean
            return Answer(Outcome.REFUSED if refused else Outcome.UNKNOWN, error.reason)
        return Answer(Outcome.RETURNED)

    async def _call(self, name: str, key: str, epoch: int, action: Mapping[str, Any]) -> BaseModel:
        meta = {EPOCH_META: epoch, KEY_META: key}
        return await self.session.call(name, {"operation_key": key, **action}, self._pair.answer, meta)
