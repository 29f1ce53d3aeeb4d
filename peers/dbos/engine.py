"""DBOS on SQLite, used as its documentation says (https://docs.dbos.dev/python/...).

- A workflow calls steps. `DBOS.start_workflow` starts it in a thread of its own; `SetWorkflowID` gives it an identity,
  which is its idempotency key: tutorials/workflow-tutorial, tutorials/idempotency-tutorial.
- The system database is a SQLite file: reference/configuration. `--setting default` leaves it as DBOS makes it (with a
  rollback journal); `--setting wal` sets the file to WAL before DBOS opens it.
- On a single server `DBOS.launch()` recovers all workflows that are PENDING for this executor ("local", unless it is
  told otherwise) and this version of the application: https://docs.dbos.dev/production/workflow-recovery
  After 100 recoveries it gives a workflow up, for good: here the verdict `refused`.
- "Steps are tried at least once but are never re-executed after they complete": a step that was killed after its effect
  is run again. To avoid a repeated effect the step must be idempotent: a user passes a key, such as the workflow's
  identity, to a tool that de-duplicates (here the variant `keyed`).
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from dbos import DBOS, SetWorkflowID

sys.path.append(str(Path(__file__).parents[1]))
import world

OPTIONS = argparse.Namespace()
"""What this process was asked for: an accident belongs to a process, not to a workflow's recorded input."""
STARTED = threading.Event()
"""Set when no workflow has to wait for another to be started."""


@DBOS.step()
def nothing() -> str:
    """Take a step that does nothing."""
    return world.PAYLOAD


@DBOS.workflow()
def idle(steps: int) -> None:
    """Take `steps` steps that do nothing."""
    for _ in range(steps):
        nothing()


@DBOS.step()
def note(run: str, step: int) -> str:
    """Take a step that leaves a note."""
    world.count_step(OPTIONS.folder, run, step, 0 if OPTIONS.again else OPTIONS.runs * OPTIONS.steps // 2)
    return world.PAYLOAD


@DBOS.workflow()
def noted(run: str, steps: int) -> None:
    """Take `steps` steps that leave a note, once every run has been started."""
    STARTED.wait()
    for step in range(steps):
        note(run, step)


@DBOS.step()
def act(path: str, op: str, variant: str) -> str:
    """Have the effect."""
    return world.effect(Path(path), op, variant, OPTIONS.accident, OPTIONS.times)


@DBOS.workflow()
def operation(path: str, op: str, variant: str) -> str:
    """Have one effect, in one step."""
    return act(path, op, variant)


def steps() -> dict[str, object]:
    """Run R workflows of S steps, at most K in flight."""

    def run(_: int) -> None:
        DBOS.start_workflow(idle, OPTIONS.steps).get_result()

    run(0)
    first_s = world.age_s()
    before = world.stored_bytes(OPTIONS.database)
    with ThreadPoolExecutor(OPTIONS.in_flight) as pool:
        started = time.perf_counter()
        list(pool.map(run, range(OPTIONS.runs)))
        seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "bytes": world.stored_bytes(OPTIONS.database) - before,
        "rss_kb": world.peak_kb(),
        "first_s": first_s,
    }


def recover() -> dict[str, object]:
    """Start R workflows and be killed half-way; or, again, wait until all of them are complete."""
    runs = [f"run-{number:04d}" for number in range(OPTIONS.runs)]
    if not OPTIONS.again:
        for run in runs:
            with SetWorkflowID(run):
                DBOS.start_workflow(noted, run, OPTIONS.steps)
    STARTED.set()
    for run in runs:
        DBOS.retrieve_workflow(run).get_result(polling_interval_sec=0.05)
    return {"seconds": world.age_s(), **world.counted(OPTIONS.folder)}


def effect() -> dict[str, object]:
    """Start the workflow, or attach to the one that was recovered at launch, and wait for its result."""
    with SetWorkflowID(OPTIONS.op):
        handle = DBOS.start_workflow(operation, str(OPTIONS.world), OPTIONS.op, OPTIONS.variant)
    try:
        handle.get_result()
    except Exception as error:
        status = handle.get_status().status
        verdict = "refused" if status == "MAX_RECOVERY_ATTEMPTS_EXCEEDED" else "failed"
        return world.verdict(verdict, f"{status}: {error!r}")
    return world.verdict("success", f"workflow status {handle.get_status().status}")


def main() -> None:
    """Run one command and print its answer."""
    parser = world.parser(__doc__, "steps", "recover", "effect")
    parser.add_argument("--setting", choices=["default", "wal"], default="default")
    parser.parse_args(namespace=OPTIONS)
    OPTIONS.database = OPTIONS.folder.resolve() / "dbos.sqlite"
    if OPTIONS.setting == "wal":
        with closing(sqlite3.connect(OPTIONS.database)) as connection:
            connection.execute("pragma journal_mode=wal")
    DBOS(config={"name": "peer", "system_database_url": f"sqlite:///{OPTIONS.database}"})
    DBOS.launch()
    answer = {"steps": steps, "recover": recover, "effect": effect}[OPTIONS.command]()
    DBOS.destroy()
    world.tell(answer)


if __name__ == "__main__":
    main()
