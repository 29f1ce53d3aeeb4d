"""Engine and server as real processes that start at once: forked from one that has imported the SDKs already.

Each has its own process id, dies by real signals, and the server dies with its engine. What they do not show is the
first second of a fresh interpreter; the tests of the README and of the command do.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sqlite3
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import anthropic  # noqa: F401  (imported here, once, for all the processes to come)
import httpx2  # noqa: F401
import mcp  # noqa: F401
import rich.table  # noqa: F401
import typer  # noqa: F401
import uvicorn  # noqa: F401

import lab
import miniharness.cli
import miniharness.engine
import miniharness.mcp.session
import miniharness.mcp.stdio  # noqa: F401
import server
from miniharness import database, signals
from miniharness.mcp import declared
from proofs import tool
from proofs.accident import Accident, Holder, Notes, Watch
from proofs.forking import die_with_parent, fork_servers

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 0.3  # for a file that another program holds; the product's own is 5 s
LIMIT_S = 60.0
DISPATCH = "-- dispatch"


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a process lives and what will befall it or its server."""

    folder: Path
    notes: Notes
    accident: Accident | None = None
    plain: bool = False
    fault: tool.Fault | None = None
    holder: Holder | None = None
    transcript: bool = False

    def watch(self, side: str) -> Watch:
        """Watch the statements of this process from now on."""
        watch = Watch(side, self.accident, self.notes, self.folder, self.holder)
        sqlite3.connect = watch.connect  # type: ignore[assignment]
        return watch

    def end(self, side: str, watch: Watch, code: int) -> NoReturn:
        """End this process."""
        if self.transcript:
            self.notes.add(transcript=watch.transcript, side=side)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# -- the server ------------------------------------------------------------------------------------------------------


def _serve(scene: Scene, argv: Sequence[str]) -> NoReturn:
    """Be `server.py ARGV` in the world of the scene."""
    watch = scene.watch("server")
    tool.install(watch, scene.notes, scene.plain, scene.fault)
    scene.end("server", watch, server.main(list(argv[1:])))


# -- the engine ------------------------------------------------------------------------------------------------------


def _drive(scene: Scene, argv: list[str]) -> NoReturn:
    """Be `python lab.py ARGV` or `python -m miniharness ARGV`."""
    database.BUSY_TIMEOUT_S = PATIENCE_S
    watch = scene.watch("engine")
    if argv[0] == "-m":
        sys.argv = argv[1:]
        try:
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            scene.end("operator", watch, int(end.code or 0))
        scene.end("operator", watch, 0)
    kept = scene.notes.fd, *(scene.holder.pipes if scene.holder else ())
    fork_servers(partial(_serve, scene), kept)
    if scene.plain:
        lab.TOOL = replace(lab.TOOL, deduplicates=False)
    dispatch = declared.DeclaredTool.dispatch

    async def watched(self: declared.DeclaredTool, *args: Any) -> Any:
        due = watch.before(DISPATCH)
        answer = await dispatch(self, *args)
        watch.after(DISPATCH, due)
        return answer

    declared.DeclaredTool.dispatch = watched  # type: ignore[assignment, method-assign]
    signals.hold()
    scene.end("engine", watch, lab.main(argv[1:]))


class Process:
    """A command of the lab as a process; it starts at once."""

    def __init__(self, scene: Scene, argv: Sequence[str]) -> None:
        self._output = [os.memfd_create(name) for name in ("out", "err")]
        self.code: int | None = None
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            die_with_parent(parent)
            for fd, memory in enumerate(self._output, start=1):
                os.dup2(memory, fd)
            os.chdir(ROOT)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            try:
                _drive(scene, list(argv))
            finally:
                os._exit(70)

    def wait(self, until_frozen: bool = False) -> int | None:
        """Wait for its end, or also until it is stopped; then there is no exit code. It is killed after a minute."""
        give_up = time.monotonic() + LIMIT_S
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | (os.WUNTRACED if until_frozen else 0))
            if pid and os.WIFSTOPPED(status):
                return None
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > give_up:
                os.kill(self.pid, signal.SIGKILL)
            else:
                time.sleep(0.002)
        return self.code

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    @property
    def told(self) -> dict[str, Any] | None:
        """The JSON object that it printed, if it did."""
        text = self._text(0)
        return json.loads(text) if text.startswith("{") else None

    @property
    def errors(self) -> str:
        """What it said on standard error."""
        return self._text(1)

    def _text(self, number: int) -> str:
        return os.pread(self._output[number], 1 << 24, 0).decode()

    def __del__(self) -> None:
        for memory in self._output:
            os.close(memory)
