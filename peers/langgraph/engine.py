"""LangGraph with its SQLite checkpointer, used as its documentation says.

- A graph is compiled with a checkpointer and invoked with a `thread_id`, which is the workflow's identity; with
  `durability="sync"` every checkpoint is written before the next node starts. S steps are one node that loops, as an
  agent does. https://docs.langchain.com/oss/python/langgraph/durable-execution
- Workflows in flight are a pool of threads on one `SqliteSaver`, which has one connection and a lock. The alternative,
  `AsyncSqliteSaver`, is as durable and was slower, with 6 steps and with 100.
- Nothing resumes by itself: recovery is "executing the workflow with the same thread identifier by providing it with a
  `None` as the input value", and begins with the node that was stopped. One has to know which threads there were.
- So a node that was killed after its effect is run again. To avoid a repeated effect, "use idempotency keys or verify
  existing results" in the node (here the variant `keyed` passes the `thread_id` to a tool that de-duplicates).
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

sys.path.append(str(Path(__file__).parents[1]))
import world

OPTIONS = argparse.Namespace()
"""What this process was asked for: an accident belongs to a process, not to a workflow's recorded state."""


class State(TypedDict):
    """What a checkpoint holds: the number of steps taken, and the last one's result."""

    step: int
    result: str


NEW: State = {"step": 0, "result": ""}
RESUMED_AT_ONCE = 8  # 1, 8 and 32 are equally fast


def nothing(state: State) -> State:
    """Take a step that does nothing."""
    return {"step": state["step"] + 1, "result": world.PAYLOAD}


def note(state: State, config: RunnableConfig) -> State:
    """Take a step that leaves a note; the first one waits until every run has been started."""
    if not OPTIONS.again and state["step"] == 0:
        OPTIONS.started.wait()
    kill_after = 0 if OPTIONS.again else OPTIONS.runs * OPTIONS.steps // 2
    world.count_step(OPTIONS.folder, config["configurable"]["thread_id"], state["step"], kill_after)
    return {"step": state["step"] + 1, "result": world.PAYLOAD}


def act(state: State, config: RunnableConfig) -> State:
    """Have the effect."""
    op = config["configurable"]["thread_id"]
    return {"step": 1, "result": world.effect(OPTIONS.world, op, OPTIONS.variant, OPTIONS.accident, OPTIONS.times)}


def compiled(node: Callable[..., State], saver: SqliteSaver) -> CompiledStateGraph:
    """Build the graph in which `node` loops until all steps are taken."""
    builder = StateGraph(State)
    builder.add_node("work", node)
    builder.add_edge(START, "work")
    builder.add_conditional_edges("work", lambda state: "work" if state["step"] < OPTIONS.steps else END)
    return builder.compile(checkpointer=saver)


def thread(name: str) -> RunnableConfig:
    """Address the workflow `name`."""
    return {"configurable": {"thread_id": name}, "recursion_limit": OPTIONS.steps + 1}


def steps(saver: SqliteSaver) -> dict[str, object]:
    """Run R workflows of S steps, at most K in flight."""
    graph = compiled(nothing, saver)

    def run(name: str) -> None:
        graph.invoke(NEW, thread(name), durability="sync")

    run("warm-up")
    first_s = world.age_s()
    before = world.stored_bytes(OPTIONS.database)
    with ThreadPoolExecutor(OPTIONS.in_flight) as pool:
        started = time.perf_counter()
        list(pool.map(run, [f"run-{number:04d}" for number in range(OPTIONS.runs)]))
        seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "bytes": world.stored_bytes(OPTIONS.database) - before,
        "rss_kb": world.peak_kb(),
        "first_s": first_s,
    }


def recover(saver: SqliteSaver) -> dict[str, object]:
    """Start R workflows and be killed half-way; or, again, resume every one of them."""
    OPTIONS.started = threading.Barrier(OPTIONS.runs)
    graph = compiled(note, saver)

    def run(name: str) -> None:
        graph.invoke(None if OPTIONS.again else NEW, thread(name), durability="sync")

    with ThreadPoolExecutor(RESUMED_AT_ONCE if OPTIONS.again else OPTIONS.runs) as pool:
        list(pool.map(run, [f"run-{number:04d}" for number in range(OPTIONS.runs)]))
    return {"seconds": world.age_s(), **world.counted(OPTIONS.folder)}


def effect(saver: SqliteSaver) -> dict[str, object]:
    """Start the workflow, or resume it when it has a checkpoint."""
    OPTIONS.steps = 1
    graph = compiled(act, saver)
    known = graph.get_state(thread(OPTIONS.op)).created_at is not None
    try:
        graph.invoke(None if known else NEW, thread(OPTIONS.op), durability="sync")
    except Exception as error:
        return world.verdict("failed", repr(error))
    rest = graph.get_state(thread(OPTIONS.op)).next
    return world.verdict("unknown" if rest else "success", f"invoke returned, next nodes {rest}")


def main() -> None:
    """Run one command and print its answer."""
    world.parser(__doc__, "steps", "recover", "effect").parse_args(namespace=OPTIONS)
    OPTIONS.database = OPTIONS.folder / "langgraph.sqlite"
    with SqliteSaver.from_conn_string(str(OPTIONS.database)) as saver:
        answer = {"steps": steps, "recover": recover, "effect": effect}[OPTIONS.command](saver)
    world.tell(answer)


if __name__ == "__main__":
    main()
