"""All trials of our own engine, on two processes, each with a small disk of its own that can really be full."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from proofs.cases import Moments, drawn, measure, planned
from proofs.forking import LIBC
from proofs.trial import Case, Result, Trial

BATCH = 64
ACTIONS = ("kill", "kill-any", "freeze", "full", "busy", "pause")
NEW_NAMESPACE = 0x00020000
PRIVATE_USER = 0x10000000
_here: dict[str, Path] = {}


def settle_down(folder: str) -> None:
    """Make this process's disk: a file system in memory that nobody else sees; else a plain folder."""
    disk = Path(tempfile.mkdtemp(dir=folder))
    user, group = os.getuid(), os.getgid()
    if LIBC.unshare(ctypes.c_int(NEW_NAMESPACE)) != 0 and LIBC.unshare(NEW_NAMESPACE | PRIVATE_USER) == 0:
        with suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    for command in (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", "size=4m", "proofs", str(disk)]):
        subprocess.run(command, capture_output=True, check=False)
    _here["disk"] = disk


def can_be_full(_: int = 0) -> bool:
    """Whether this process has a disk of its own."""
    return os.path.ismount(_here["disk"])


def _measure(_: int) -> Moments:
    moments = measure(_here["disk"] / "first")
    shutil.rmtree(_here["disk"] / "first")
    return moments


def _try(case: Case) -> Result:
    for left in _here["disk"].iterdir():
        shutil.rmtree(left)
    return Trial(case, _here["disk"] / "trial").run()


class Ours:
    """The trials; `tell` gets one line now and then."""

    def __init__(self, seed: int, jobs: int, tell: Callable[[str], object]) -> None:
        self._seed = seed
        self._tell = tell
        memory = Path("/dev/shm")  # the death of a process asks nothing of a disk
        self._folder = tempfile.mkdtemp(prefix="proofs-", dir=memory if memory.is_dir() else None)
        gc.collect()
        gc.freeze()  # what is imported stays; a fork need not copy it to look at it
        context = multiprocessing.get_context("fork")
        self._pool = context.Pool(jobs, settle_down, (self._folder,))
        self.full = self._pool.apply(can_be_full)
        self.moments: Moments = self._pool.apply(_measure, (0,))
        self.actions = [action for action in ACTIONS if self.full or action != "full"]
        self.results: list[Result] = []

    def close(self) -> None:
        """End the processes and give the memory back."""
        self._pool.terminate()
        self._pool.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def kills(self) -> int:
        """How many SIGKILLs there were."""
        return sum(result.kills for result in self.results)

    def run(self, kills: int, stride: int) -> None:
        """The planned cases, then drawn ones until there were so many kills."""
        actions = [a for a in self.actions if stride == 1 or a != "kill-any"]
        self._do(planned(self.moments, self._seed, stride, actions))
        number = 0
        while self.kills < kills:
            self._do(drawn(self.moments, self._seed, n, self.actions) for n in range(number, number + BATCH))
            number += BATCH

    def only(self, name: str) -> None:
        """One case alone."""
        if name.startswith("mixed/"):
            self._do([drawn(self.moments, self._seed, int(name.partition("/")[2]), self.actions)])
            return
        strides = (1, 8)
        plans = (case for stride in strides for case in planned(self.moments, self._seed, stride, self.actions))
        self._do([next(case for case in plans if case.name == name)])

    def _do(self, cases: Iterable[Case]) -> None:
        for result in self._pool.imap_unordered(_try, list(cases)):
            self.results.append(result)
            if not result.good:
                self._tell("\n  ".join([f"FAILED {result.case}", *result.trouble[:20], result.trouble[-1]]))
                self._tell(f"  again: python -m proofs --only {result.case} --seed {self._seed}")
            if len(self.results) % 200 == 0:
                self._tell(f"{len(self.results)} runs, {self.kills} kills")
