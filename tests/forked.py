"""A command as a real process that starts at once: forked from one that has imported the SDKs already.

It has its own process id, dies by real signals, and so does its server. What this does not show is the first second of
fresh interpreters; test_readme.py, test_cli.py and test_provider.py do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from proofs.forking import fork_servers, run_program

ROOT = Path(__file__).resolve().parent.parent
NURSERY = multiprocessing.get_context("forkserver")
NURSERY.set_forkserver_preload(["mcp", "mcp.server", "httpx2", "uvicorn", "anthropic", "typer", "rich.table"])


def _be(argv: Sequence[str], env: Mapping[str, str], parent: int, output: Mapping[int, int]) -> None:
    for fd, memory in output.items():
        os.dup2(os.open(f"/proc/{parent}/fd/{memory}", os.O_WRONLY | os.O_APPEND), fd)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fork_servers()
    run_program(argv)


class Forked:
    """`python ARGV` in the checkout's root, with the part of `subprocess.Popen` that the tests use."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._output = {fd: os.memfd_create(f"output {fd}") for fd in (1, 2)}
        self._process = NURSERY.Process(target=_be, args=(argv, env, os.getpid(), self._output))
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("the command", timeout or 0)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self._text(1), self._text(2)

    def _text(self, fd: int) -> str:
        return os.pread(self._output[fd], 1 << 20, 0).decode()

    def __del__(self) -> None:
        for memory in self._output.values():
            os.close(memory)

    def says(self, text: str, limit_s: float = 60) -> bool:
        """Wait until a line on its standard error begins with `text`; false when it ends without."""
        give_up = time.monotonic() + limit_s
        while time.monotonic() < give_up:
            ended = self.poll() is not None
            if any(line.startswith(text) for line in self._text(2).splitlines()):
                return True
            if ended:
                break
            time.sleep(0.02)
        return False

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
