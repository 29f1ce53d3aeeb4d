"""Which description and schemas of a tool were last accepted: a changed description can bring in instructions.

Knows no session; a definition is the tool's entry in the server's catalogue, as JSON.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miniharness.contract import canonical
from miniharness.database import Database
from miniharness.errors import ToolUnavailable

APPLICATION_ID = 0x4D48_5001  # "MHP" and 1

MIGRATIONS = (
    """
    create table pins (
      tool text primary key,
      definition text not null
    ) strict, without rowid;
    """,
)


class Pins:
    """The accepted definitions of tools, by their full name; the file lies beside the journal.

    Raises:
        StoreError: from any method, when the file cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._db = Database(folder / "tools.sqlite", APPLICATION_ID, MIGRATIONS)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def check(self, tool: str, definition: Mapping[str, Any], accept: str) -> None:
        """Pin a tool that is seen for the first time; afterwards it must stay as it is.

        Raises:
            ToolUnavailable: it has changed; names the command `accept`, which shows and accepts the change.
        """
        with self._db.transaction():
            pinned = self._get(tool)
            if pinned is None:
                self._put(tool, definition)
            elif pinned != canonical(definition):
                raise ToolUnavailable(
                    f"the description or the schema of {tool} has changed; see how, and accept it: {accept}"
                )

    def accept(self, tool: str, definition: Mapping[str, Any]) -> str:
        """Pin the tool as it is now; returns how it differs from before, line by line."""
        with self._db.transaction():
            before, now = self._get(tool), canonical(definition)
            self._put(tool, definition)
        old, new = (json.dumps(json.loads(text), indent=2, ensure_ascii=False) for text in (before or "null", now))
        return "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), "accepted", "now", lineterm=""))

    def _get(self, tool: str) -> str | None:
        row = self._db.execute("select definition from pins where tool = ?", (tool,)).fetchone()
        return str(row[0]) if row else None

    def _put(self, tool: str, definition: Mapping[str, Any]) -> None:
        values = {"tool": tool, "definition": canonical(definition)}
        self._db.execute(
            "insert into pins values (:tool, :definition) on conflict (tool) do update set definition = :definition",
            values,
        )
