"""The command `python -m proofs`: kill our own engine and, where they are installed, the peers; write the page.

Exit code 1 when one of our runs had a repeated effect, a loss, a wrong verdict, or was stuck.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peers.environment import install, python_of
from proofs.ours import Ours
from proofs.page import render
from proofs.peers import USES, Cell
from proofs.process import ROOT

KILLS, SMALL_KILLS = 2000, 200
STRIDE = 8  # of the small run
CODE = ("lab.py", "model.py", "store.py", "server.py", "miniharness", "peers")  # what the page's commit speaks for


def tell(line: str) -> None:
    """Say it on standard error."""
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m proofs", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--kills", type=int, help=f"at least so many SIGKILLs of our own (default: {KILLS}, with --small {SMALL_KILLS})"
    )
    add("--seed", type=int, default=random.randrange(1 << 32), help="of every random choice (default: a new one)")
    add("--peers", default="", metavar="NAMES", help=f"with commas, none or all: {', '.join(USES)}")
    add("--small", action="store_true", help="every eighth boundary and no peers: under a minute")
    add("--only", metavar="CASE", help="one case of our own, as a failure names it")
    add("--jobs", type=int, default=(os.cpu_count() or 1) + 1, help="trials at a time (default: %(default)s)")
    add("--keep", type=Path, metavar="FILE", help="write the results of our own runs there, as JSON")
    add("--cells", type=Path, metavar="FILE", help="what `python -m proofs.peers NAMES` printed, instead of running it")
    add("--out", type=Path, metavar="FILE", help="write the page there")
    return parser


def _peers(args: argparse.Namespace) -> list[str]:
    """The peers that were asked for; by default those that are installed, and none in a small run."""
    if args.cells or args.peers == "none":
        return []
    if not args.peers:
        return [] if args.small or args.only else [name for name in USES if python_of(name).exists()]
    if args.peers == "all":
        return [name for name in USES if name != "absurd" or shutil.which("initdb")]  # which needs a Postgres
    return args.peers.split(",")


def _facts(args: argparse.Namespace, names: list[str], began: float, full: bool) -> dict[str, Any]:
    def git(*argv: str) -> str:
        return subprocess.run(["git", *argv], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = " with changes that are not committed" if git("status", "--porcelain", "--", *CODE) else ""
    small = " --small" if args.small else ""
    kills = f" --kills {args.kills}" if args.kills else ""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": git("rev-parse", "--short", "HEAD") + changed,
        "seed": args.seed,
        "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, Linux {platform.release()}",
        "minutes": (time.monotonic() - began) / 60,
        "command": f"python -m proofs{small}{kills} --seed {args.seed} --peers {','.join(names) or 'none'}",
        "full": full,
        "small": args.small,
    }


def main() -> int:
    """Run it."""
    args = _parser().parse_args()
    began = time.monotonic()
    names = _peers(args)
    if unknown := set(names) - USES.keys():
        _parser().error(f"there is no peer {min(unknown)!r}; known: {', '.join(USES)}")
    for name in names:
        install(name)
    tell(f"seed {args.seed}; peers: {', '.join(names) or 'none'}")
    command = [sys.executable, "-m", "proofs.peers", *names]
    theirs = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) if names else None
    ours = Ours(args.seed, args.jobs, tell)
    try:
        if args.only:
            ours.only(args.only)
        else:
            ours.run(args.kills or (SMALL_KILLS if args.small else KILLS), STRIDE if args.small else 1)
    finally:
        ours.close()
    bad = sum(not result.good for result in ours.results)
    told = f"{len(ours.results)} runs, {ours.kills} kills, {bad} broken promises, {time.monotonic() - began:.0f} s"
    tell(told + f"; seed {args.seed}")
    printed = args.cells.read_text() if args.cells else theirs.communicate()[0] if theirs else ""
    cells = [Cell(**json.loads(line)) for line in printed.splitlines()]
    if args.keep:
        kept = {"facts": _facts(args, names, began, ours.full), "ours": [asdict(result) for result in ours.results]}
        args.keep.write_text(json.dumps(kept), encoding="utf-8")
    if args.out:
        facts = _facts(args, names, began, ours.full)
        args.out.write_text(render(facts, ours.results, cells), encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
