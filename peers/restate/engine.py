"""Restate: a server that journals every step, and a service in this process that the server calls.

Durable steps are `ctx.run_typed` in a workflow (https://docs.restate.dev/develop/python/durable-steps), served by
Hypercorn (https://docs.restate.dev/develop/python/serving), submitted and attached to over HTTP
(https://docs.restate.dev/services/invocation/http). To recover, server and service are started again and the server
retries what was in flight. Should the service's old address still be taken (its process is frozen), the new one is
announced with `PATCH /deployments/ID` (https://docs.restate.dev/admin-api/deployment/update-deployment).
The server's settings are its defaults, without telemetry. In `effect` a stalled step is given up after 5 + 5 s
(https://docs.restate.dev/services/configuration); the defaults need about a minute.

A step whose result did not reach the server runs again. A user avoids the second effect with a key (their own, or
`ctx.uuid()` drawn before the step) and a tool that de-duplicates.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import restate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import world
from local_server import ask, call, connect, engine, size_bytes

Step = Callable[[str, int], str] | Callable[[str, int], Awaitable[str]]


def work(step: Step, gate: asyncio.Barrier | None = None, **options: timedelta) -> restate.Workflow:
    """The workflow of every command: durable steps, one after the other."""
    workflow = restate.Workflow("work", **options)

    @workflow.main()
    async def run(ctx: restate.WorkflowContext, steps: int) -> None:
        if gate:
            await gate.wait()
        for number in range(steps):
            await ctx.run_typed(f"step-{number}", step, run=ctx.key(), number=number)

    return workflow


def steps(args: argparse.Namespace) -> dict[str, float]:
    """Time workflows of no-op steps."""

    async def step(run: str, number: int) -> str:
        return world.PAYLOAD

    with engine(args.folder, work(step)) as (port, server):
        ask(port, "POST", ["/work/warm-up/run"], args.steps)
        first_s = world.age_s()
        before, started = size_bytes(args.folder), time.perf_counter()
        ask(port, "POST", (f"/work/run-{run}/run" for run in range(args.runs)), args.steps, args.in_flight)
        seconds = time.perf_counter() - started
        grown, peak = size_bytes(args.folder) - before, world.peak_kb() + world.peak_kb(server)
    return {"seconds": seconds, "bytes": grown, "rss_kb": peak, "first_s": first_s}


def recover(args: argparse.Namespace) -> dict[str, float]:
    """Be killed, together with the server, after half of the steps; `again`: finish the other half."""
    half = 0 if args.again else args.runs * args.steps // 2

    async def step(run: str, number: int) -> str:
        world.count_step(args.folder, run, number, kill_after=half)
        return world.PAYLOAD

    with engine(args.folder, work(step, None if args.again else asyncio.Barrier(args.runs))) as (port, _):
        if not args.again:
            ask(port, "POST", (f"/work/run-{run}/run/send" for run in range(args.runs)), args.steps, in_flight=16)
            signal.pause()
        ask(port, "GET", (f"/restate/workflow/work/run-{run}/attach" for run in range(args.runs)), in_flight=16)
        return {"seconds": world.age_s(), **world.counted(args.folder)}


def effect(args: argparse.Namespace) -> dict[str, object]:
    """One workflow with one effect; submitting it a second time attaches to the first."""

    def step(run: str, number: int) -> str:
        return world.effect(args.world, run, args.variant, args.accident, args.times)

    patience = {"inactivity_timeout": timedelta(seconds=5), "abort_timeout": timedelta(seconds=5)}
    with engine(args.folder, work(step, **patience)) as (port, _), connect(port) as connection:
        submitted = call(connection, "POST", f"/work/{args.op}/run/send", 1)[1]["status"]
        try:
            status, answer = call(connection, "GET", f"/restate/workflow/work/{args.op}/attach")
        except TimeoutError:
            return world.verdict("unknown", f"{submitted}, and no answer after 600 s")
    return world.verdict("success" if status == 200 else "failed", f"{submitted}, HTTP {status}, {answer}")


def main() -> None:
    """Run one command and print its answer."""
    parser = world.parser(__doc__, "steps", "recover", "effect")
    args = parser.parse_args()
    world.tell({"steps": steps, "recover": recover, "effect": effect}[args.command](args))


if __name__ == "__main__":
    main()
