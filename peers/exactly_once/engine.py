"""exactly-once 0.2.1: a key is claimed before its effect runs; a key left in flight is quarantined.

Followed: https://github.com/swarmproof/exactly-once (README, "Quickstart" and "Recipes"; docs/ARCHITECTURE.md 5 and 9).
Plain use never repeats: `QuarantinedError` until somebody decides. With `--lookup` the policy is `check_then_decide`
with a prober that asks the world by key, and the lease of the README's recipe for concurrent workers (30 s, or
`--lease`; 0 is its recipe for a crash, without one): as long as the lease is valid a key is left to its owner, so what
is quarantined is asked for once more when the lease has run out. A user avoids a repeated effect by passing
`current_key()` to a tool that de-duplicates; a lease bounds how long an owner may be silent, not what it may still do.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from exactly_once import ProbeResult, QuarantinedError, Store, Verdict, check_then_decide, current_key, once, quarantine
from exactly_once.errors import ExactlyOnceError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import world


def perform(args: argparse.Namespace) -> tuple[str, str]:
    """Run the guarded effect; what an earlier process left in flight is probed, if asked to."""

    def look_up(key: str) -> ProbeResult:
        if world.books(args.world).get(key, {}).get("effects"):
            return ProbeResult(Verdict.COMMITTED, world.PAYLOAD)
        return ProbeResult(Verdict.NOT_COMMITTED)

    store = Store.sqlite(str(args.folder / "effects.db"))
    policy = check_then_decide(look_up) if args.lookup else quarantine

    @once(store, key=lambda op: op, policy=policy, lease_ttl=(args.lease or None) if args.lookup else None)
    def insert(op: str) -> str:
        return world.effect(args.world, current_key() or op, args.variant, args.accident, args.times)

    try:
        try:
            insert(args.op)
        except QuarantinedError:
            record = store.get(args.op)
            if record is None or record.lease_expires_at is None:
                raise
            time.sleep(max(0.0, record.lease_expires_at - store.now()) + 0.1)
            insert(args.op)
    except QuarantinedError as error:
        return "unknown", f"QuarantinedError: {error}"
    except ExactlyOnceError as error:
        return "refused", f"{type(error).__name__}: {error}"
    return "success", "result returned"


def main() -> None:
    """Run the command and print its verdict."""
    parser = world.parser(__doc__, "effect")
    parser.add_argument("--lookup", action="store_true", help="with the prober")
    parser.add_argument("--lease", type=float, default=30.0, help="seconds; 0: no lease")
    world.tell(world.verdict(*perform(parser.parse_args())))


if __name__ == "__main__":
    main()
