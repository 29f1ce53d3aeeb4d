"""One trial: a run that suffers its accidents, goes on as it is told to, and whose world is counted at the end."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proofs.accident import BALLAST, Accident, Holder, Notes
from proofs.process import Process, Scene
from proofs.tool import Fault, tickets

FINAL = ("succeeded", "failed", "cancelled")
STEPS = 30  # commands that are followed until a run that has no accidents any more counts as stuck
SHORT_S, LONG_S = 0.05, 60.0  # how long a file is held: within the patience, or until its victim has given up


@dataclass(frozen=True)
class Case:
    """What will happen to one run: one accident in each of its lives, and the tool's fault."""

    name: str
    row: str
    accidents: tuple[Accident, ...] = ()
    fault: Fault | None = None
    plain: bool = False
    dispatches: int = 3
    cancel: bool = False  # an operator asks for it after the accidents
    permit: bool = True  # the lives with accidents have the leave to write


@dataclass
class Result:
    """The books of one trial; everything is counted from the world's file, exit codes and the command's JSON."""

    case: str
    row: str
    kills: int = 0
    other: int = 0  # freezes, full disks, held files
    fault: str = ""
    effects: int = 0
    dispatches: int = 0  # calls that arrived at the tool
    limit: int = 0
    repeated: int = 0
    lost: int = 0
    stuck: int = 0
    wrong: int = 0
    over: int = 0
    bug: int = 0
    declared: int = 0  # the run asked for a person at least once
    ended: str = ""
    trouble: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        return not (self.repeated or self.lost or self.stuck or self.wrong or self.over or self.bug)


class Trial:
    """A case on a folder of its own."""

    def __init__(self, case: Case, disk: Path) -> None:
        self._case = case
        self._folder = disk / "state"
        self._folder.mkdir(parents=True)
        self._notes = Notes()
        self._result = Result(case.name, case.row, fault=case.fault.name if case.fault else "")
        self._result.limit = case.dispatches
        self._goal = {"source": case.name, "title": "核验 Agent Harness 资料"}
        self._story: list[str] = []

    def run(self) -> Result:
        """Let it all happen, then finish and count."""
        try:
            for accident in self._case.accidents:
                self._live(accident)
            if self._case.cancel:
                self._command(["-m", "miniharness", "--state-dir", str(self._folder), "cancel", "run"])
            self._judge(self._finish())
        finally:
            self._notes.close()
            shutil.rmtree(self._folder)
        return self._result

    # -- lives

    def _argv(self, *more: str) -> list[str]:
        goal = ("--source", self._goal["source"], "--title", self._goal["title"])
        limit = ("--dispatches", str(self._case.dispatches))
        return ["lab.py", "--state-dir", str(self._folder), "--run", "run", *goal, *limit, "--json", *more]

    def _scene(self, accident: Accident | None = None, holder: Holder | None = None) -> Scene:
        return Scene(self._folder, self._notes, accident, self._case.plain, self._case.fault, holder)

    def _command(self, argv: list[str]) -> Process:
        return self._ended(Process(self._scene(), argv))

    def _ended(self, process: Process) -> Process:
        """Wait for the end of a command, and see that it was no bug of ours."""
        process.wait()
        code, told = process.code, process.told or {}
        self._story.append(f"exit {code}, {told.get('state')}, {(told.get('interrupted') or {}).get('message', '')}")
        if code not in (0, 1, 2, 3, 75, -signal.SIGKILL) or "Traceback" in process.errors:
            self._result.bug = 1
            self._story.append(process.errors[-1500:])
        return process

    def _live(self, accident: Accident) -> None:
        """One life with its accident."""
        self._story.append(str(accident))
        before = len(self._notes.read("accident"))
        permit = ("--execute",) if self._case.permit else ()
        holder = self._holder(accident)
        process = Process(self._scene(accident, holder), self._argv(*permit))
        try:
            if accident.action == "freeze" and (frozen := self._frozen(process, before)):
                self._ended(Process(self._scene(), self._argv("--execute", "--take-over")))
                with suppress(ProcessLookupError):
                    os.kill(frozen, signal.SIGCONT)
            self._ended(process)
        finally:
            if holder:
                holder.close()
            (self._folder / BALLAST).unlink(missing_ok=True)
        self._count(accident, process, before)

    def _holder(self, accident: Accident) -> Holder | None:
        if accident.action not in ("busy", "pause"):
            return None
        name = "runs.sqlite" if accident.side == "engine" else "tickets.sqlite"
        return Holder(self._folder / name, LONG_S if accident.action == "busy" else SHORT_S)

    def _frozen(self, process: Process, before: int) -> int:
        """Wait until its victim is frozen; its process id, or 0 when everything ended without."""
        while not process.ended:
            for note in self._notes.read("accident")[before:]:
                state = _state(note["pid"])
                if state == "T":
                    return int(note["pid"])
            time.sleep(0.002)
        return 0

    def _count(self, accident: Accident, process: Process, before: int) -> None:
        happened = len(self._notes.read("accident")) - before
        if accident.action != "kill":
            self._result.other += happened
            return
        self._result.kills += happened
        if accident.side == "engine" and (process.code == -signal.SIGKILL) != bool(happened):
            self._result.bug = 1
            self._story.append("the engine did not die of its accident")

    # -- the end

    def _finish(self) -> dict[str, Any] | None:
        """Follow the commands that the run names until it has ended; its last answer, or None when it is stuck."""
        argv = self._argv("--execute")
        for _ in range(STEPS):
            told = self._command(argv).told
            if told is None:
                argv = self._argv("--execute")  # an operator's command prints no JSON
                continue
            if told["state"] in FINAL:
                return told
            named = told["next"] or {"action": "resume", "command": shlex.join(["python", *self._argv()])}
            if told["next"] is None and not told["interrupted"]:
                return None
            argv = self._named(named["action"], shlex.split(named["command"])[1:])
            if not argv:
                return None
        return None

    def _named(self, action: str, argv: list[str]) -> list[str]:
        if action == "ask_operator":
            self._result.declared = 1
            self._result.limit += 1
            return argv
        if action in ("resume", "execute"):
            return [*argv, "--json", *(["--execute"] if "--execute" not in argv else [])]
        return []  # nobody else is alive, and the server fences: neither `wait` nor `settle` can be right

    def _judge(self, told: dict[str, Any] | None) -> None:
        """Count what is in the world, and compare what was said with it."""
        result, found = self._result, tickets(self._folder)
        result.effects = len(found)
        result.dispatches = len(self._notes.read("call"))
        result.repeated = max(0, len(found) - 1)
        result.over = max(0, result.dispatches - result.limit)
        result.stuck = int(told is None)
        result.ended = told["state"] if told else "stuck"
        right = [payload for _, payload in found] == [self._goal]
        asked = self._case.cancel
        result.lost = int(not found and result.ended != "stuck" and not (asked and result.ended == "cancelled"))
        result.wrong = int((result.ended == "succeeded" and not right) or (result.ended in FINAL[1:] and bool(found)))
        if not result.good:
            result.trouble = [f"{self._case}", *self._story, f"ended {result.ended}, world {found}"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
