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
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import restate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import world
from local_server import ask, call, connect, engine, peak_kb, size_bytes

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


def steps(folder: Path, *, runs: int, steps: int, in_flight: int, setting: str) -> dict[str, float]:
    """Time workflows of no-op steps."""

    async def step(run: str, number: int) -> str:
        return world.PAYLOAD

    with engine(folder, work(step)) as (port, server):
        ask(port, "POST", ["/work/warm-up/run"], steps)
        first_s = world.age_s()
        before, started = size_bytes(folder), time.perf_counter()
        ask(port, "POST", (f"/work/run-{run}/run" for run in range(runs)), steps, in_flight)
        seconds = time.perf_counter() - started
        grown, peak = size_bytes(folder) - before, peak_kb("self") + peak_kb(server)
    return {"seconds": seconds, "bytes": grown, "rss_kb": peak, "first_s": first_s}


def recover(folder: Path, *, runs: int, steps: int, again: bool) -> dict[str, float]:
    """Be killed, together with the server, after half of the steps; `again`: finish the other half."""
    half = 0 if again else runs * steps // 2

    async def step(run: str, number: int) -> str:
        world.count_step(folder, run, number, kill_after=half)
        return world.PAYLOAD

    with engine(folder, work(step, None if again else asyncio.Barrier(runs))) as (port, _):
        if not again:
            ask(port, "POST", (f"/work/run-{run}/run/send" for run in range(runs)), steps, in_flight=16)
            signal.pause()
        ask(port, "GET", (f"/restate/workflow/work/run-{run}/attach" for run in range(runs)), in_flight=16)
        return {"seconds": world.age_s(), **world.counted(folder)}


def effect(folder: Path, path: Path, *, op: str, variant: str, accident: str, times: int) -> dict[str, str]:
    """One workflow with one effect; submitting it a second time attaches to the first."""

    def step(run: str, number: int) -> str:
        return world.effect(path, run, variant, accident, times)

    patience = {"inactivity_timeout": timedelta(seconds=5), "abort_timeout": timedelta(seconds=5)}
    with engine(folder, work(step, **patience)) as (port, _), connect(port) as connection:
        submitted = call(connection, "POST", f"/work/{op}/run/send", 1)[1]["status"]
        try:
            status, answer = call(connection, "GET", f"/restate/workflow/work/{op}/attach")
        except TimeoutError:
            return {"verdict": "unknown", "detail": f"{submitted}, and no answer after 600 s"}
    return {"verdict": "success" if status == 200 else "failed", "detail": f"{submitted}, HTTP {status}, {answer}"}


def main() -> None:
    """Run one command and print its answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for command in (steps, recover, effect):
        one = commands.add_parser(command.__name__)
        one.set_defaults(command=command)
        one.add_argument("folder", type=Path)
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
    commands.choices["steps"].add_argument("--setting", choices=["default"], default="default")
    commands.choices["recover"].add_argument("--again", action="store_true")
    options = vars(parser.parse_args())
    sys.stdout.write(json.dumps(options.pop("command")(**options)) + "\n")


if __name__ == "__main__":
    main()
