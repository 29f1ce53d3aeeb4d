"""What every peer has: the command line, and the outside world with its own database and the accidents there.

Stdlib only; it runs in each peer's own virtual environment. What counts is read from here, never from an engine's
own records.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

PAYLOAD = json.dumps({"result": "y" * 186})
"""What a no-op step returns: 200 bytes."""


ACCIDENTS = ["none", "kill-before", "kill-after", "freeze-before", "freeze-after"]


def age_s() -> float:
    """Seconds since this process was started."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def peak_kb(pid: int | str = "self") -> int:
    """The most memory that a process has held."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0])


def stored_bytes(database: Path) -> int:
    """The size of a SQLite file, when what a write-ahead log holds has been copied into it."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("pragma wal_checkpoint(passive)")
    return database.stat().st_size


# -- the command line --------------------------------------------------------------------------------------------------


def parser(description: str | None, *commands: str) -> argparse.ArgumentParser:
    """The command line that every engine has: `COMMAND FOLDER [WORLD]`; an engine adds what is its own."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("command", choices=commands)
    made.add_argument("folder", type=_made, help="where the engine keeps its data; made if missing")
    made.add_argument("world", type=Path, nargs="?", help="of `effect`: the world's database")
    made.add_argument("--op", help="of `effect`: the operation's identity")
    made.add_argument("--variant", choices=["plain", "keyed"], default="plain")
    made.add_argument("--accident", choices=ACCIDENTS, default="none")
    made.add_argument("--times", type=int, default=0)
    for name in ("runs", "steps", "in-flight"):
        made.add_argument(f"--{name}", type=int, default=1)
    made.add_argument("--again", action="store_true", help="of `recover`: after the kill")
    return made


def _made(folder: str) -> Path:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)


def tell(answer: Mapping[str, object]) -> None:
    """Print a command's answer: one JSON object."""
    sys.stdout.write(json.dumps(answer) + "\n")


def verdict(told: str, detail: str) -> dict[str, object]:
    """The answer of `effect`: `success`, `failed`, `unknown` or `refused`, as the product tells its user, and why."""
    return {"verdict": told, "detail": detail}


# -- steps without an effect -------------------------------------------------------------------------------------------


def count_step(folder: Path, run: str, step: int, kill_after: int = 0) -> None:
    """Note that a step ran; at the `kill_after`-th note this process is killed (0: never)."""
    notes = folder / "steps.txt"
    file = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{run}:{step:04d}\n".encode())
    os.close(file)
    if kill_after and notes.read_bytes().count(b"\n") >= kill_after:
        os.kill(os.getpid(), signal.SIGKILL)


def counted(folder: Path) -> dict[str, int]:
    """How many distinct steps ran, and how many of them more than once."""
    notes = Counter((folder / "steps.txt").read_text().split())
    return {"distinct": len(notes), "re_executed": sum(1 for times in notes.values() if times > 1)}


# -- one effect --------------------------------------------------------------------------------------------------------


def open_world(path: Path) -> sqlite3.Connection:
    """The world's database: `effects` has a row for each effect, `calls` one for each call that arrived."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=10)
    connection.executescript(
        "create table if not exists effects (id integer primary key, op text, key text unique);"
        "create table if not exists calls (id integer primary key, op text);"
    )
    return connection


def effect(path: Path, op: str, variant: str, accident: str, times: int) -> str:
    """Have one effect on the world: `plain` adds a row each time, `keyed` one row for each key.

    For the first `times` calls, the process is killed or frozen `before` or `after` the effect.
    """
    with closing(open_world(path)) as connection:
        connection.execute("insert into calls (op) values (?)", (op,))
        calls = connection.execute("select count(*) from calls where op = ?", (op,)).fetchone()[0]
        due = accident if calls <= times else "none"
        _happen(due, "before")
        key = op if variant == "keyed" else None
        connection.execute("insert or ignore into effects (op, key) values (?, ?)", (op, key))
        _happen(due, "after")
    return PAYLOAD


def _happen(accident: str, moment: str) -> None:
    if accident == f"kill-{moment}":
        os.kill(os.getpid(), signal.SIGKILL)
    if accident == f"freeze-{moment}":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.01)  # the signal arrives before the next instruction that matters


def books(path: Path) -> dict[str, dict[str, int]]:
    """For each operation how many calls arrived and how many effects there are."""
    with closing(open_world(path)) as connection:
        calls = dict(connection.execute("select op, count(*) from calls group by op").fetchall())
        effects = dict(connection.execute("select op, count(*) from effects group by op").fetchall())
    return {op: {"calls": calls.get(op, 0), "effects": effects.get(op, 0)} for op in calls.keys() | effects.keys()}
