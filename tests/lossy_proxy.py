"""Between a client and any server on standard input and output: the answer to the first write is lost, once.

    lossy_proxy.py before|after TOOL MET -- COMMAND...

The server is killed when the first call of TOOL arrives, `before` it gets the call, or `after` it has answered; then
this process ends, too, without a word to the client. The file MET tells that it has happened; from then on COMMAND
takes the place of this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any


class Lossy:
    """The two streams of messages, and the server between them."""

    def __init__(self, fate: str, tool: str, met: Path, command: list[str]) -> None:
        self._fate, self._tool, self._met = fate, tool, met
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lost: Any = None  # the id of the call whose answer is lost

    def _end(self) -> None:
        self._met.touch()  # first, for the other thread ends this process when the server has ended
        self._server.kill()
        self._server.wait()
        os._exit(1)

    def forward(self) -> None:
        """Pass on what the client says, until it says no more."""
        assert self._server.stdin
        for line in sys.stdin.buffer:
            message = json.loads(line)
            if message.get("method") == "tools/call" and message["params"]["name"] == self._tool:
                if self._fate == "before":
                    self._end()
                self._lost = message["id"]
            self._server.stdin.write(line)
            self._server.stdin.flush()
        self._server.stdin.close()

    def answer(self) -> None:
        """Pass on what the server says, but for the one answer; end when it ends."""
        assert self._server.stdout
        for line in self._server.stdout:
            if self._lost is not None and json.loads(line).get("id") == self._lost:
                self._end()
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        os._exit(self._server.wait())


if __name__ == "__main__":
    given, wanted, told, _, *argv = sys.argv[1:]
    if Path(told).exists():
        os.execvp(argv[0], argv)
    lossy = Lossy(given, wanted, Path(told), argv)
    Thread(target=lossy.answer, daemon=True).start()
    lossy.forward()
