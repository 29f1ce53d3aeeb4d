"""Two worlds, one accident: the tool process is killed (SIGKILL) after its commit and before its answer.

A conventional retry loop writes to a plain table; Mini Harness writes through an MCP tool that takes its operation
key. `demo_tool.py` is the tool process of either world.
"""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from miniharness.contract import Contract, Tool
from miniharness.engine import Json, Ports, drive
from miniharness.errors import ToolUnavailable
from miniharness.machine import Run, State
from miniharness.mcp.child import Child
from miniharness.mcp.declared import DeclaredTool, keyed
from miniharness.mcp.session import stdio_session
from miniharness.mcp.wire import Limits
from miniharness.runs import Runs

TOOL_PROCESS = (sys.executable, "-m", "miniharness.demo_tool")
GOAL = {"text": "refund order 1001"}
TOOL = Tool(name="create_note", resource="note", fences=False, deduplicates=True)


class Text(BaseModel):
    """What a note says."""

    text: str


class Note(BaseModel):
    """A note as the server has it."""

    id: int
    action: Text


class Found(BaseModel):
    """The answer of both tools."""

    note: Note | None


DECLARED = keyed(
    look_up="lookup_note", write="create_note", noun="note", fields=frozenset(GOAL), answer=Found, clean=frozenset()
)


def main() -> int:
    """Run both worlds; 0 when the loop wrote twice and Mini Harness once, with a checked outcome."""
    with tempfile.TemporaryDirectory() as scratch:
        plain, kept = Path(scratch) / "plain.sqlite", Path(scratch) / "kept.sqlite"
        children = [Child([*TOOL_PROCESS, "mcp", str(kept), fate]) for fate in ("die", "live")]  # both warm up now
        import mcp  # noqa: F401 - and so do we, so that the time below is the accident's own

        began = time.perf_counter()
        _retry_loop(plain)
        run = asyncio.run(_harness(Path(scratch), children))
        took = time.perf_counter() - began
        loop_rows, harness_rows = _rows(plain), _rows(kept)
    print("The tool process was killed (SIGKILL) after its commit, before its answer, in both worlds.\n")
    _tell("a conventional retry loop", "reported success", loop_rows)
    _tell("Mini Harness", f"{run.state}, {run.dispatches_spent} dispatch, looked up after the kill", harness_rows)
    print(f"{took:.1f} s after the imports. Next, in a checkout: python lab.py --state-dir ./state-demo")
    as_promised = len(harness_rows) == run.dispatches_spent == 1 and run.state is State.SUCCEEDED
    return 0 if as_promised and len(loop_rows) == 2 else 1


def _tell(world: str, outcome: str, rows: list[tuple[Any, ...]]) -> None:
    print(f"{world}: {outcome}")
    for number, text in rows:
        print(f"  row {number}: {text}")
    print(f"  = {len(rows)} {'row' if len(rows) == 1 else 'rows'} for one order\n")


def _rows(path: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("select id, text from notes order by id").fetchall()


def _retry_loop(path: Path) -> None:
    """Call the tool until it answers, as most tool loops do."""
    for die in ("die", "live"):
        if subprocess.run([*TOOL_PROCESS, "plain", path, die], check=False).returncode == 0:  # noqa: S603
            return


async def _agree(goal: Json) -> tuple[Json, Json]:
    return goal, {}


async def _harness(folder: Path, children: list[Child]) -> Run:
    """Drive one run against a server that is killed, then again against a living one."""
    contract = Contract(goal=dict(GOAL), tool=TOOL, provider="fixture", model="none", command="miniharness demo")
    runs = Runs(folder / "state")
    try:
        for child in children:
            run = await runs.open("demo", contract)
            async with stdio_session(child, Limits()) as session:
                try:
                    run = await drive(runs, run, Ports(_agree, DeclaredTool(session, DECLARED)), permit=True)
                except ToolUnavailable:  # the server is gone; the next pass is the restart
                    continue
        return run
    finally:
        runs.close()
