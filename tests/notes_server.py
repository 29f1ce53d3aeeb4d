"""A tool server as somebody else may have written it: notes in a text file, no fences, no help with recovery.

    notes_server.py FILE [FATE]

With a fate the first write that arrives ends badly, once: `before` and `after` kill the process around the effect,
`slow` takes effect two seconds later, `error` answers with an error although the note is there, `refuse` with one
that did nothing, and `lie` claims to have done what it has not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import BaseModel

FILE = Path(sys.argv[1])
FATE = sys.argv[2] if len(sys.argv) > 2 else ""
MET = FILE.with_name("met")  # the fate
LOCKED = FILE.with_name("locked")  # while it is there, nobody can read the notes

server = MCPServer("notes", log_level="WARNING")


class Note(BaseModel):
    """A note."""

    number: int
    title: str
    tag: str
    key: str


class Notes(BaseModel):
    """All of them."""

    notes: list[Note]


def notes() -> list[Note]:
    if not FILE.exists():
        return []
    return [Note(number=n, **json.loads(line)) for n, line in enumerate(FILE.read_text().splitlines(), start=1)]


def fate(*names: str) -> bool:
    if FATE not in names or MET.exists():
        return False
    MET.touch()
    return True


def write(title: str, tag: str, key: str) -> None:
    if fate("before"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fate("lie"):
        return
    if FATE == "slow" and fate("slow"):
        time.sleep(2)
    with FILE.open("a") as file:
        file.write(json.dumps({"title": title, "tag": tag, "key": key}) + "\n")
    if fate("after"):
        os.kill(os.getpid(), signal.SIGKILL)


def failed(code: str, message: str) -> CallToolResult:
    content = {"error": {"code": code, "message": message}}
    return CallToolResult(content=[TextContent(type="text", text=message)], structured_content=content, is_error=True)


@server.tool()
def add(title: str, tag: str = "") -> Annotated[CallToolResult, dict[str, Any]]:
    """Add a note."""
    if fate("refuse"):
        return failed("quota", "the quota is used up")
    write(title, tag, "")
    if fate("error"):
        return failed("internal", "something went wrong")
    return CallToolResult(content=[TextContent(type="text", text=f"added {title}")], structured_content={})


@server.tool()
def put(idempotency_key: str, title: str) -> str:
    """Add a note, once for each key."""
    if not any(note.key == idempotency_key for note in notes()):
        write(title, "", idempotency_key)
    return "done"


@server.tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True))
def harmless(title: str) -> str:
    """Add a note, whatever the annotations say."""
    write(title, "", "")
    return "nothing was changed"


@server.tool()
def all_notes() -> Notes:
    """Return all notes."""
    return Notes(notes=notes())


@server.tool(structured_output=False)
def text_only() -> list[dict[str, Any]]:
    """Return all notes as JSON in a text."""
    return [note.model_dump() for note in notes()]


@server.tool()
def hang() -> str:
    """Never answer."""
    time.sleep(3600)
    return ""


@server.tool()
def grumble(title: str) -> str:
    """Fail with words only."""
    raise ToolError(f"{title}: the disk is full")


@server.tool()
def one_note(title: str) -> Note:
    """Return a note; that there is none is an error."""
    found = [note for note in notes() if note.title == title]
    if LOCKED.exists():
        raise ToolError("the notes are locked")
    if not found:
        raise ToolError(f"there is no note {title}")
    return found[0]


@server.tool()
def text_notes() -> str:
    """Return all notes as text, and an error as text, too."""
    if LOCKED.exists():
        return "error: the notes are locked"
    return "\n".join(f"{note.number}: {note.title}" for note in notes())


if __name__ == "__main__":
    server.run()
