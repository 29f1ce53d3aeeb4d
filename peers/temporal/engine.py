"""Temporal: a development server that keeps every workflow's history, and a worker in this process.

Durable steps are activities (https://docs.temporal.io/develop/python/activities/execution) of a workflow in a file of
its own (https://docs.temporal.io/develop/python/best-practices/python-sdk-sandbox). To recover, the server is started
again on its file (`--db-filename`, https://docs.temporal.io/cli/command-reference/server), and a worker on the same
task queue; an activity that did not report back in 5 s (`start_to_close_timeout`: every user must choose a limit) is
run again. The setting `stock` is the server as it is; `tuned` has its SQLite file in WAL mode with FULL syncs, and lets
it poll its own queues 5000 times a second instead of 20.

"Activity implementation code should be idempotent" (the first page): a step whose result did not reach the server runs
again. A user avoids the second effect with a key (https://docs.temporal.io/activity-definition#idempotency) and a tool
that de-duplicates.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.client import Client, WorkflowFailureError
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.worker import Worker

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import world
from local_server import engine
from work import Work

QUEUE = "work"


def worker(client: Client, step: Callable[..., Any]) -> Worker:
    """A worker that can run the workflow, with this step; it lets a step that has begun come to its end."""
    return Worker(
        client,
        task_queue=QUEUE,
        workflows=[Work],
        activities=[activity.defn(name="step")(step)],
        activity_executor=ThreadPoolExecutor(100),  # for a step that is not async
        graceful_shutdown_timeout=timedelta(seconds=10),
    )


async def steps(args: argparse.Namespace) -> dict[str, float]:
    """Time workflows of no-op steps."""
    places = asyncio.Semaphore(args.in_flight)

    async def step(run: str, number: int) -> str:
        return world.PAYLOAD

    async with engine(args.folder, args.setting) as (client, server), worker(client, step):

        async def complete(run: str) -> None:
            async with places:
                await client.execute_workflow(Work.run, args.steps, id=run, task_queue=QUEUE)

        await complete("warm-up")
        first_s = world.age_s()
        before, started = world.stored_bytes(args.folder / "temporal.db"), time.perf_counter()
        await asyncio.gather(*(complete(f"run-{run}") for run in range(args.runs)))
        seconds = time.perf_counter() - started
        grown, peak = world.stored_bytes(args.folder / "temporal.db") - before, world.peak_kb() + world.peak_kb(server)
    return {"seconds": seconds, "bytes": grown, "rss_kb": peak, "first_s": first_s}


async def recover(args: argparse.Namespace) -> dict[str, float]:
    """Be killed, together with the server, after half of the steps; `again`: finish the other half."""
    half = 0 if args.again else args.runs * args.steps // 2

    async def step(run: str, number: int) -> str:
        world.count_step(args.folder, run, number, kill_after=half)
        return world.PAYLOAD

    async with engine(args.folder, args.setting) as (client, _):
        if not args.again:
            for run in range(args.runs):  # all of them are started before there is a worker
                await client.start_workflow(Work.run, args.steps, id=f"run-{run}", task_queue=QUEUE)
        async with worker(client, step):
            await asyncio.gather(*(client.get_workflow_handle(f"run-{run}").result() for run in range(args.runs)))
            return {"seconds": world.age_s(), **world.counted(args.folder)}


async def effect(args: argparse.Namespace) -> dict[str, object]:
    """One workflow with one effect; starting it a second time attaches to the first."""

    def step(run: str, number: int) -> str:
        return world.effect(args.world, run, args.variant, args.accident, args.times)

    async with engine(args.folder, args.setting) as (client, _), worker(client, step):
        with suppress(WorkflowAlreadyStartedError):
            once = WorkflowIDReusePolicy.REJECT_DUPLICATE
            await client.start_workflow(Work.run, 1, id=args.op, task_queue=QUEUE, id_reuse_policy=once)
        handle = client.get_workflow_handle(args.op)
        try:
            await handle.result()
        except WorkflowFailureError as error:
            return world.verdict("failed", repr(error.cause))
        status = (await handle.describe()).status
    return world.verdict("success", f"workflow status {status.name if status else None}")


def main() -> None:
    """Run one command and print its answer."""
    parser = world.parser(__doc__, "steps", "recover", "effect")
    parser.add_argument("--setting", choices=["stock", "tuned"], default="stock")
    args = parser.parse_args()
    stdout = os.dup(1)
    os.dup2(2, 1)  # the SDK logs to standard output
    answer = asyncio.run({"steps": steps, "recover": recover, "effect": effect}[args.command](args))
    os.dup2(stdout, 1)
    world.tell(answer)


if __name__ == "__main__":
    main()
