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
import json
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
from local_server import engine, peak_kb, size_bytes
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


async def steps(folder: Path, *, runs: int, steps: int, in_flight: int, setting: str) -> dict[str, float]:
    """Time workflows of no-op steps."""
    places = asyncio.Semaphore(in_flight)

    async def step(run: str, number: int) -> str:
        return world.PAYLOAD

    async with engine(folder, setting) as (client, server), worker(client, step):

        async def complete(run: str) -> None:
            async with places:
                await client.execute_workflow(Work.run, steps, id=run, task_queue=QUEUE)

        await complete("warm-up")
        first_s = world.age_s()
        before, started = size_bytes(folder), time.perf_counter()
        await asyncio.gather(*(complete(f"run-{run}") for run in range(runs)))
        seconds = time.perf_counter() - started
        grown, peak = size_bytes(folder) - before, peak_kb("self") + peak_kb(server)
    return {"seconds": seconds, "bytes": grown, "rss_kb": peak, "first_s": first_s}


async def recover(folder: Path, *, runs: int, steps: int, again: bool, setting: str) -> dict[str, float]:
    """Be killed, together with the server, after half of the steps; `again`: finish the other half."""
    half = 0 if again else runs * steps // 2

    async def step(run: str, number: int) -> str:
        world.count_step(folder, run, number, kill_after=half)
        return world.PAYLOAD

    async with engine(folder, setting) as (client, _):
        if not again:
            for run in range(runs):  # all of them are started before there is a worker
                await client.start_workflow(Work.run, steps, id=f"run-{run}", task_queue=QUEUE)
        async with worker(client, step):
            await asyncio.gather(*(client.get_workflow_handle(f"run-{run}").result() for run in range(runs)))
            return {"seconds": world.age_s(), **world.counted(folder)}


async def effect(
    folder: Path, path: Path, *, op: str, variant: str, accident: str, times: int, setting: str
) -> dict[str, str]:
    """One workflow with one effect; starting it a second time attaches to the first."""

    def step(run: str, number: int) -> str:
        return world.effect(path, run, variant, accident, times)

    async with engine(folder, setting) as (client, _), worker(client, step):
        with suppress(WorkflowAlreadyStartedError):
            once = WorkflowIDReusePolicy.REJECT_DUPLICATE
            await client.start_workflow(Work.run, 1, id=op, task_queue=QUEUE, id_reuse_policy=once)
        handle = client.get_workflow_handle(op)
        try:
            await handle.result()
        except WorkflowFailureError as error:
            return {"verdict": "failed", "detail": repr(error.cause)}
        status = (await handle.describe()).status
    return {"verdict": "success", "detail": f"workflow status {status.name if status else None}"}


def main() -> None:
    """Run one command and print its answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for command in (steps, recover, effect):
        one = commands.add_parser(command.__name__)
        one.set_defaults(command=command)
        one.add_argument("folder", type=Path)
        one.add_argument("--setting", choices=["stock", "tuned"], default="stock")
        if command is effect:
            one.add_argument("path", type=Path, metavar="world")
            one.add_argument("--op", required=True)
            one.add_argument("--variant", choices=["plain", "keyed"], default="plain")
            one.add_argument("--accident", default="none")
            one.add_argument("--times", type=int, default=0)
        else:
            one.add_argument("--runs", type=int, required=True)
            one.add_argument("--steps", type=int, required=True)
    commands.choices["steps"].add_argument("--in-flight", type=int, default=1)
    commands.choices["recover"].add_argument("--again", action="store_true")
    options = vars(parser.parse_args())
    stdout = os.dup(1)
    os.dup2(2, 1)  # the SDK logs to standard output
    answer = asyncio.run(options.pop("command")(**options))
    os.write(stdout, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
