"""The floor: SQLite alone, with no engine around it. Each command is a process and prints one JSON object.

Knows nothing of this engine. WAL, `synchronous=full`, one transaction for each step.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path

from peers import world

TABLES = """
    create table if not exists runs (id text primary key, version integer) strict, without rowid;
    create table if not exists events (
      run text, seq integer, at real, epoch integer, type text, detail text, digest text, primary key (run, seq)
    ) strict, without rowid;
"""
APPEND = "insert into events values (?, ?, 0.0, 1, 'step', ?, '')"
MOVE = "update runs set version = ? where id = ? and version = ?"


def connect(path: Path) -> sqlite3.Connection:
    """Open the file with SQLite's own busy handler, as the documentation of sqlite3 has it."""
    connection = sqlite3.connect(path, timeout=5, isolation_level=None)
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = full")
    connection.executescript(TABLES)
    return connection


def take_step(connection: sqlite3.Connection, run: str, step: int, *, moves: bool) -> None:
    """One durable step: append an event and, if it `moves`, advance the run's row by compare-and-set."""
    connection.execute("begin immediate")
    try:
        connection.execute(APPEND, (run, step, world.PAYLOAD))
        if moves and step == 0:
            connection.execute("insert into runs values (?, 0)", (run,))
        elif moves:
            assert connection.execute(MOVE, (step, run, step - 1)).rowcount == 1
        connection.execute("commit")
    except sqlite3.OperationalError:
        connection.execute("rollback")
        raise


def steps(options: argparse.Namespace) -> dict[str, float]:
    """R runs of S steps, one at a time."""
    with closing(connect(options.folder / "floor.sqlite")) as connection:
        for step in range(options.steps):
            take_step(connection, "warm-up", step, moves=options.moves)
        started = time.perf_counter()
        for run in range(options.runs):
            for step in range(options.steps):
                take_step(connection, f"run-{run:05d}", step, moves=options.moves)
        seconds = time.perf_counter() - started
    return {"seconds": seconds}


def loop(options: argparse.Namespace) -> dict[str, float]:
    """Steps until the time is over, together with whoever else writes this file: how many, and the slowest."""
    name, count, worst, locked = f"p{os.getpid()}", 0, 0.0, 0
    with closing(connect(options.folder / "floor.sqlite")) as connection:
        begin = wait_for_begin()
        while (now := time.time()) < begin + options.seconds:
            try:
                take_step(connection, name, count, moves=True)
                count += 1
            except sqlite3.OperationalError:
                locked += 1
            worst = max(worst, time.time() - now)
    return {"count": count, "worst_s": worst, "errors": locked}


def wait_for_begin() -> float:
    """Say that this process is ready, and wait for the moment at which all of them begin."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    begin = float(sys.stdin.readline())
    time.sleep(max(0.0, begin - time.time()))
    return begin


def sync(options: argparse.Namespace) -> dict[str, float]:
    """The median time of one write of 4096 bytes with fdatasync."""
    took = []
    with (options.folder / "sync.bin").open("wb", buffering=0) as file:
        for _ in range(options.runs):
            started = time.perf_counter()
            file.write(b"x" * 4096)
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - started)
    return {"p50_s": statistics.median(took)}


def main() -> None:
    """Run one command and print its answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["steps", "loop", "sync"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--moves", action="store_true", help="also update the run's row with a version check")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    answer = {"steps": steps, "loop": loop, "sync": sync}[options.command](options)
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
