"""Death at a chosen SQL statement: of connections in this process, or of real processes of the commands.

    killed_at.py [--engine ACTION@WHEN] [--server ACTION@WHEN] [--dispatch ACTION] ARGUMENTS-OF-LAB
    killed_at.py miniharness ACTION@WHEN ARGUMENTS-OF-MINIHARNESS

runs the command with ACTION (`kill`, `stop`, `hang`) before the statement WHEN of the side: a number, or a text
and `#n` for the n-th statement that holds it; with a `+` behind it right after that statement. At its end each side
tells on standard error how many it executed, and how many of them were commits.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = "tests/killed_at.py"
CONNECT = sqlite3.connect


class Killed(BaseException):
    """The process would be dead here; nothing that handles errors may handle this."""


class Watch:
    """Counts the statements of the connections made by `connect`, and calls `act` before each one that is `due`.

    With `after` it is called right after that statement.
    """

    def __init__(self, due: Callable[[int, str], bool], act: Callable[[str], None], *, after: bool = False) -> None:
        self.count = self.commits = 0
        self._due = due
        self._act = act
        self._after = after
        self._connections: list[sqlite3.Connection] = []

    def connect(self, path: Any, **options: Any) -> sqlite3.Connection:
        watch = self

        class Watched(sqlite3.Connection):
            def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
                due = watch.sees(sql)
                if due and not watch._after:
                    watch._act(sql)
                cursor = super().execute(sql, parameters)
                if due and watch._after:
                    watch._act(sql)
                return cursor

        connection = CONNECT(path, factory=Watched, **options)
        self._connections.append(connection)
        return connection

    def sees(self, sql: str) -> bool:
        """Count the statement; whether it is the one."""
        self.count += 1
        self.commits += sql == "commit"
        return self._due(self.count, sql)

    def bury(self) -> None:
        """Drop every connection, as the end of a process does."""
        for connection in self._connections:
            connection.close()


def mortal(k: int) -> Watch:
    """Dies in this process before its k-th statement (0: never), and runs nothing more, not even a rollback."""

    def act(sql: str) -> None:
        raise Killed(sql)

    return Watch(lambda count, sql: 0 < k <= count, act)


def _due(when: str) -> Callable[[int, str], bool]:
    text, _, nth = when.partition("#")
    if text.isdecimal():
        return lambda count, sql: count == int(text)
    seen: list[str] = []

    def due(count: int, sql: str) -> bool:
        seen.extend([sql] if text in sql else [])
        return text in sql and len(seen) == int(nth or 1)

    return due


def _perform(action: str, side: str, where: str, when: str = "before") -> None:
    print(f"{side}: {action} {when}: {' '.join(where.split())[:60]}", file=sys.stderr, flush=True)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        while True:
            signal.pause()


def _watched(side: str, spec: str) -> Watch:
    action, _, when = spec.removesuffix("+").partition("@")
    after = spec.endswith("+")
    watch = Watch(_due(when), lambda sql: _perform(action, side, sql, "after" if after else "before"), after=after)
    sqlite3.connect = watch.connect  # type: ignore[assignment]
    return watch


def _end(side: str, watch: Watch, code: int) -> None:
    print(f"{side}: {watch.count} statements\n{side}: {watch.commits} commits", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def _serve(spec: str, argv: list[str]) -> None:
    import server

    watch = _watched("server", spec)
    _end("server", watch, server.main(argv))


def _miniharness(spec: str, argv: list[str]) -> None:
    from miniharness.__main__ import main

    watch, code = _watched("engine", spec), 0
    sys.argv = ["miniharness", *argv]
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    _end("engine", watch, code)


def _lab(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for side in ("--engine", "--server"):
        parser.add_argument(side, default="kill@0")
    parser.add_argument("--dispatch")
    mine, theirs = parser.parse_known_args(argv)
    import lab
    from miniharness import signals
    from miniharness.mcp import child, declared

    class Server(child.Child):
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            super().__init__([sys.executable, __file__, "serve", mine.server, *command[2:]], env)

    class Tool(declared.DeclaredTool):
        async def dispatch(self, key: Any, action: Any, epoch: int) -> Any:
            if mine.dispatch:
                _perform(mine.dispatch, "engine", "the dispatch")
            return await super().dispatch(key, action, epoch)

    child.Child, declared.DeclaredTool = Server, Tool  # type: ignore[misc]
    signals.hold()  # as the command does
    watch = _watched("engine", mine.engine)
    _end("engine", watch, lab.main(theirs))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    match sys.argv[1:]:
        case ["serve", given, *rest]:
            _serve(given, rest)
        case ["miniharness", given, *rest]:
            _miniharness(given, rest)
        case rest:
            _lab(rest)
