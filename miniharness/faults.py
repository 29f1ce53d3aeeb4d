"""The named crash points: places where a process can be told to die, to see that nothing is lost or repeated."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miniharness.engine import Answer, Json, Tool

CLIENT_AFTER_INTENT = "client-after-intent"
SERVER_AFTER_COMMIT = "server-after-commit"
CLIENT_AFTER_RESULT = "client-after-result"
POINTS = (CLIENT_AFTER_INTENT, SERVER_AFTER_COMMIT, CLIENT_AFTER_RESULT)

ENVIRONMENT = "MINIHARNESS_FAULT"  # how a server child learns of its fault
EXIT_CODE = 86


def reach(point: str, armed: str | None) -> None:
    """End this process at once, without any clean-up, if `point` is the armed one."""
    if point == armed:
        print(f"fault {point}: the {point.partition('-')[0]} process ends here", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


class FaultyTool:
    """A tool around which the client dies as `armed` says."""

    def __init__(self, tool: Tool, armed: str | None) -> None:
        self._tool = tool
        self._armed = armed
        self.connect = tool.connect
        self.look_up = tool.look_up

    async def dispatch(self, key: str, action: Json, epoch: int) -> Answer:
        """Dispatch, or die just before it or just after it."""
        reach(CLIENT_AFTER_INTENT, self._armed)
        answer = await self._tool.dispatch(key, action, epoch)
        reach(CLIENT_AFTER_RESULT, self._armed)
        return answer
