"""`Popen` for Python programs that forks this process instead of starting a fresh interpreter.

The program is a real process with its own id, dies by real signals and dies with its parent; only the second in which
it would import the SDKs is left out. For proofs and tests, not for the product.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import os
import runpy
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from miniharness.mcp import child

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
Serve = Callable[[Sequence[str]], object]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def run_program(argv: Sequence[str]) -> None:
    """Be `python ARGV`, of which the first is a file or `-m`."""
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        runpy.run_path(argv[0], run_name="__main__")


def fork_servers(serve: Serve = run_program, kept: Collection[int] = ()) -> None:
    """From now on those server children of this process are forked that are Python programs of this interpreter.

    `serve` gets what stands behind `python`. The descriptors `kept` stay open in them.
    """

    class Forking(subprocess.Popen[bytes]):
        def _execute_child(self, args: list[str], *rest: Any) -> None:
            if sys.executable not in args:  # a server of somebody else
                super()._execute_child(args, *rest)  # type: ignore[misc]
                return
            env, (reads, _, _, writes) = rest[5], rest[9:13]
            ready, tell = os.pipe()
            parent = os.getpid()
            self.pid = os.fork()
            if self.pid == 0:
                os.setsid()
                die_with_parent(parent)
                os.write(tell, b"!")
                os.dup2(reads, 0)
                os.dup2(writes, 1)
                for fd in set(range(3, 256)) - set(kept):
                    os.closerange(fd, fd + 1)
                contextvars.Context().run(_become, serve, args[args.index(sys.executable) + 1 :], env)
            os.close(tell)
            os.read(ready, 1)
            for fd in (ready, reads, writes):
                os.close(fd)
            self._child_created = True

    child.subprocess = SimpleNamespace(  # type: ignore[assignment, attr-defined]
        Popen=Forking, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )


def _become(serve: Serve, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Be another program in a process that was the engine a moment ago and shares nothing with it but the pipes."""
    asyncio._set_running_loop(None)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    sqlite3.connect = sqlite3.dbapi2.connect  # whatever watched the engine's
    os.environ.clear()
    os.environ.update(env)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    try:
        serve(argv)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
