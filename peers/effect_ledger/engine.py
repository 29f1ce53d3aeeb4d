"""effect-ledger 0.1.2: the operation is claimed on disk before the effect, and an unresolved claim blocks.

Followed: https://github.com/donggyun112/effect-ledger (README, "Execution contract" and "Operator recovery") and its
docs/composition.md ("Binding a single effect", "Recovery policy"). Plain use never repeats: whatever was interrupted
stays `in_flight` until an operator resolves it. With `--lookup` a recovery policy asks the world by key. `recover`
wants the promise that the old workers have stopped; here a lock that every worker holds for its life keeps it, so a
process that is only frozen is seen. `--assert-stopped` makes the promise unchecked. A user avoids a repeated effect
by stopping the workers first, or by handing the operation's own key to a tool that de-duplicates.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
from pathlib import Path

from effect_ledger import EffectExecutor, Operation, OperationConflict, RecoveryDecision

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import world


def perform(args: argparse.Namespace) -> tuple[str, str]:
    """Recover what an earlier process left, if asked to, and execute."""

    def look_up(operation: Operation) -> RecoveryDecision:
        decision = f"{operation.operation_id}-{operation.version}"
        if world.books(args.world).get(operation.operation_id, {}).get("effects"):
            return RecoveryDecision("complete", decision, "the world has it", world.PAYLOAD)
        return RecoveryDecision("retry", decision, "the workers have stopped and the world does not have it")

    executor = EffectExecutor(args.folder / "effects.sqlite", scope="world", recovery=look_up if args.lookup else None)
    execute = executor.bind(
        "insert:v1",
        lambda operation: world.effect(args.world, operation.operation_id, args.variant, args.accident, args.times),
    )
    with (args.folder / "workers.lock").open("w") as lock:
        if args.lookup and executor.get(args.op) and (args.assert_stopped or alone(lock.fileno())):
            executor.recover(args.op, workers_stopped=True)
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            answer = execute(args.op, {}).response()
        except OperationConflict as error:
            return "refused", f"OperationConflict: {error}"
    return ("unknown" if answer["unresolved"] else "success"), f"{answer['state']}, next_action {answer['next_action']}"


def alone(lock: int) -> bool:
    """Whether no other worker is alive, frozen ones included."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main() -> None:
    """Run the command and print its verdict."""
    parser = world.parser(__doc__, "effect")
    parser.add_argument("--lookup", action="store_true", help="with the recovery policy")
    parser.add_argument("--assert-stopped", action="store_true", help="promise stopped workers without a check")
    world.tell(world.verdict(*perform(parser.parse_args())))


if __name__ == "__main__":
    main()
