"""A server process: started with pipes, watched, and gone when we are. Knows nothing of messages. Linux only."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from miniharness.errors import ToolUnavailable
from miniharness.mcp.wire import Limits

DRAIN_S = 0.1  # after its death, how long a child's last words are read while a grandchild keeps the pipe open
_PASSED_ON = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER", "VIRTUAL_ENV")


class Child:
    """A running server process in a session of its own.

    The kernel kills it when the thread that made this object ends, so make it in one that lives as long as the
    process. It gets a short list of environment variables and `env`; our secrets are not among them. What it says on
    standard error goes to ours, or to `stderr`, as `subprocess` has it.

    Raises:
        ToolUnavailable: the command does not exist, or this is not Linux with util-linux.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None, stderr: int | None = None) -> None:
        for program in ("setpriv", argv[0]):
            if not shutil.which(program):
                raise ToolUnavailable(f"the server cannot be started: there is no command {program!r}")
        try:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *argv],  # so that no orphan writes after our death
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={name: os.environ[name] for name in _PASSED_ON if name in os.environ} | dict(env or {}),
                start_new_session=True,  # a Ctrl-C at the terminal is for us alone
                bufsize=0,
            )
        except OSError as error:
            raise ToolUnavailable(f"the server cannot be started: {error}") from error
        self._pidfd = os.pidfd_open(self._process.pid)
        self.died = asyncio.Event()
        self.fault = ""  # why we killed it, if we did

    @property
    def pid(self) -> int:
        """The process id; `setpriv` becomes the server, so it is the server's own."""
        return self._process.pid

    async def open(self) -> None:
        """Connect the pipes to the running event loop, and watch for the process's death."""
        loop = asyncio.get_running_loop()
        self.output = asyncio.StreamReader()
        self._output, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self.output), self._process.stdout
        )
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, self._process.stdin)
        self._input = asyncio.StreamWriter(transport, protocol, None, loop)
        loop.add_reader(self._pidfd, self._has_died)

    def _has_died(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        self._process.wait()
        self.died.set()
        loop.call_later(DRAIN_S, self._output.close)  # end of file, whoever still holds the other end

    async def write(self, data: bytes, limit_s: float) -> None:
        """Put all of `data` into the pipe; a child that does not take it in time is killed.

        Raises:
            OSError: the child is dead or did not take the data; part of it may have arrived.
        """
        self._input.write(data)
        try:
            async with asyncio.timeout(limit_s):
                await self._input.drain()
        except TimeoutError:
            self.kill(f"it did not read its input for {limit_s:g} s")
            raise BrokenPipeError(self.fault) from None

    def kill(self, fault: str = "") -> None:
        """End the process and everything it started, now."""
        self.fault = self.fault or fault
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    @property
    def ending(self) -> str:
        """How it ended, for an error message."""
        if self.fault:
            return f"it was stopped because {self.fault}"
        code = self._process.returncode
        if code is None:
            return "it closed its output"
        return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code}"

    async def close(self, limits: Limits) -> None:
        """End the child: by closing its input, else by SIGTERM, else by SIGKILL, each with its own limit."""
        if hasattr(self, "_input"):
            self._input.close()
            for number in (None, signal.SIGTERM, signal.SIGKILL):
                if number:
                    self._signal(number)
                with suppress(TimeoutError):
                    async with asyncio.timeout(limits.close_s):
                        await self.died.wait()
                        break
            self._output.close()
        self.discard()

    def discard(self) -> None:
        """Kill what is left, at once and without waiting; a second call does nothing."""
        if self._pidfd < 0:
            return
        self._signal(signal.SIGKILL)  # grandchildren, too
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe and not hasattr(self, "_input"):  # nobody has opened them
                pipe.close()
        os.close(self._pidfd)
        self._pidfd = -1
