"""Measure this engine, the floor and the other engines in interleaved cycles, and write one report.

`python -m benchmarks` takes some minutes; a first time also makes an environment for each of the others below
`.peers` (or below `PEERS_VENV`). Ratios compare figures of the same cycle.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import measures, peers, table
from benchmarks.measures import FULL, QUICK, ROOT, Figures, Sizes
from peers.environment import install

RESULTS = Path(__file__).with_name("RESULTS.md")
LEGEND = """\
Every figure is `median [min–max]` over the cycles; a ratio is taken within each cycle. A step does nothing and is
200 bytes of JSON, durable when it is done: this measures engines, not models or tools. Ratios to another engine
use a floor, or a Mini Harness, that ran right before and right after it; recovery is compared within the cycle.
The floor is a bare loop of `sqlite3`, WAL, `synchronous=full`, one transaction with one insert for each step. Mini
Harness in the first table is its journal through its public interface, except in the row of the kill: there whole
runs of 8 transitions with a tool, killed after an effect and before its answer. Each process was killed by SIGKILL
at half of all steps. Peak memory includes servers. The other engines run in the best of their fully durable
settings, and DBOS and Temporal also as they come. Re-executing a step after a kill is their documented contract."""


def cycle(chosen: list[peers.Peer], sizes: Sizes, parent: Path, faults: list[str]) -> Figures:
    """One turn of everything; what fails is noted in `faults` and left out."""
    figures: Figures = {"load": os.getloadavg()[0]}

    def measure(name: str, work: Callable[[], Figures]) -> None:
        started = time.monotonic()
        try:
            figures.update(work())
        except (RuntimeError, AssertionError, ValueError, KeyError, OSError, subprocess.SubprocessError) as error:
            faults.append(f"{name}: {repr(error)[:600]}")
            sys.stderr.write(f"  {faults[-1]}\n")
        sys.stderr.write(f"  {name}: {time.monotonic() - started:.1f} s\n")

    for kind, own, other in (
        ("one at a time", measures.one_at_a_time, peers.one_at_a_time),
        ("in flight", measures.in_flight, peers.in_flight),
        ("recovery", measures.recovery, peers.recovery),
    ):
        if kind == "one at a time":
            measure("sync", lambda: measures.sync(parent))
        measure(f"{kind}, ours", lambda own=own: own(parent, sizes))  # type: ignore[misc]
        for peer in chosen:
            measure(f"{kind}, {peer.name}", lambda other=other, peer=peer: other(peer, parent, sizes))  # type: ignore[misc]
    for work in (measures.many_processes, measures.large_stores, measures.whole_processes, measures.whole_lab):
        measure(work.__name__, lambda work=work: work(parent, sizes))  # type: ignore[misc]
    return figures


def commit() -> str:
    """The commit that is checked out, and whether files other than the results differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")


def conditions(cycles: table.Cycles, chosen: list[peers.Peer], parent: Path, begun: str) -> str:
    """Where and with what it was measured."""
    cpu = [line.partition(":")[2].strip() for line in _read("/proc/cpuinfo").splitlines() if "model name" in line]
    mounts = [line.split()[1:3] for line in _read("/proc/self/mounts").splitlines()]
    place = max((m for m in mounts if parent.resolve().is_relative_to(m[0])), key=lambda m: len(m[0]))
    checked_out = begun if commit() == begun else f"{begun}, which became {commit()} MEANWHILE"
    loads = ", ".join(f"{value:.1f}" for value in table.values(cycles, "load"))
    syncs = ", ".join(f"{value:.3f}" for value in table.values(cycles, "sync.ms"))
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, commit {checked_out}, {len(cycles)} cycles",
        f"{os.cpu_count()} × {cpu[0] if cpu else platform.machine()}, Linux {platform.release()}, {place[1]}",
        f"Python {platform.python_version()}, sqlite {sqlite3.sqlite_version}",
        f"write of 4096 bytes + fdatasync, median of each cycle: {syncs} ms",
        f"load average of the last minute at the beginning of each cycle (quiet is below 1): {loads}",
        *(peers.version(peer) for peer in chosen),
    ]
    return "\n".join(f"- {line}" for line in lines)


def _read(path: str) -> str:
    return Path(path).read_text()


def main() -> None:
    """Run the cycles and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--peers", default="dbos,langgraph,restate,temporal", help="names with commas; empty for none")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, only printed unless there is --out")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # children are killed and folders removed on the way out
    engines = {name for name in options.peers.split(",") if name}
    known = {peer.engine for peer in peers.PEERS}
    if unknown := engines - known:
        parser.error(f"there is no engine {min(unknown)!r}; known: {', '.join(sorted(known))}")
    chosen = [peer for peer in peers.PEERS if peer.engine in engines]
    for engine in engines:
        install(engine)
    begun = commit()
    sizes = QUICK if options.quick else FULL
    faults: list[str] = []
    cycles: list[Figures] = []
    out = options.out or (None if options.quick else RESULTS)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=ROOT) as folder:
        for turn in range(options.cycles):
            sys.stderr.write(f"cycle {turn + 1} of {options.cycles}\n")
            cycles.append(cycle(chosen, sizes, Path(folder), faults))
            text = report(cycles, chosen, Path(folder), faults, begun)
            if out:
                out.write_text(text)  # after each cycle, so that an interrupted run leaves the earlier ones
    sys.stdout.write(text)


def report(cycles: list[Figures], chosen: list[peers.Peer], parent: Path, faults: list[str], begun: str) -> str:
    """The whole text."""
    parts = ["# Results", conditions(cycles, chosen, parent, begun), LEGEND]
    parts.append(table.engines(cycles, [peer.name for peer in chosen], [peer.title for peer in chosen]))
    parts += ["## Mini Harness alone", table.own(cycles), "## Targets", table.targets(cycles)]
    if faults:
        parts += ["## What failed", "\n".join(f"- {fault}" for fault in faults)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
