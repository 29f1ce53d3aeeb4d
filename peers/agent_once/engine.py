"""agent-once 0.1.0: a call is claimed under its key before it runs; what was interrupted stays pending.

Followed: the README at https://pypi.org/project/agent-once/0.1.0/ (the docs: https://frogscooper.dev/once/), its
"Quickstart" (a key of one's own), "States" and "Verify". Plain use never repeats: a killed call raises `EffectPending`
until a person has looked and called `reset`. With `--lookup` the tool has a `verify` callback that asks the world by
key; it is asked for a pending record once that is older than `stale_after`, and `wait` waits so long. The README has no
default for it ("well above the tool's longest run"); here 60 s, or `--lease`. A user avoids a repeated effect by a
`stale_after` that no call can outlive, or by forwarding `idempotency_key` to a tool that de-duplicates.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from once import NOT_HAPPENED, EffectFailed, EffectPending, EffectUnknown, Once, OnceError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import world


def perform(args: argparse.Namespace) -> tuple[str, str]:
    """Make the call under its key; what an earlier process left is verified first, if asked to."""

    def insert(idempotency_key: str | None = None) -> str:
        return world.effect(args.world, str(idempotency_key), args.variant, args.accident, args.times)

    def look_up(key: str, _args: dict[str, object]) -> object:
        return world.PAYLOAD if world.books(args.world).get(key, {}).get("effects") else NOT_HAPPENED

    path = args.folder / "once.db"
    once = Once(path, stale_after=args.lease, wait=args.lease + 1) if args.lookup else Once(path)
    try:
        once.execute(insert, key=args.op, verify=look_up if args.lookup else None)
    except (EffectPending, EffectUnknown) as error:
        return "unknown", f"{type(error).__name__}: {error}"
    except EffectFailed as error:
        return "failed", f"{type(error).__name__}: {error}"
    except OnceError as error:
        return "refused", f"{type(error).__name__}: {error}"
    return "success", "result returned"


def main() -> None:
    """Run the command and print its verdict."""
    parser = world.parser(__doc__, "effect")
    parser.add_argument("--lookup", action="store_true", help="with the verify callback")
    parser.add_argument("--lease", type=float, default=60.0, help="seconds until a pending call counts as abandoned")
    world.tell(world.verdict(*perform(parser.parse_args())))


if __name__ == "__main__":
    main()
