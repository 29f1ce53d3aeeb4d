"""Many runs at once: goals stream through a limited number of places, and what a person sees of it.

Knows no application: what a goal is, which contract it has and which model proposes come from outside.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from typing import IO, Any, TypeVar

from miniharness.contract import Contract
from miniharness.engine import Model, Ports, drive, in_a_thread
from miniharness.errors import (
    ENDED_BADLY,
    NEEDS_A_PERSON,
    OK,
    TRY_AGAIN,
    USAGE,
    ContractMismatch,
    HarnessError,
    Interrupted,
    ToolUnavailable,
    UsageError,
)
from miniharness.machine import FINAL, Run
from miniharness.mcp.pool import Pool, PoolExhausted
from miniharness.report import exit_code, nothing, report
from miniharness.runs import Runs, refuse_other

T = TypeVar("T")
R = TypeVar("R")
Goal = Mapping[str, Any] | str

SERVERS_FOR_A_RUN = 3
TOLD_EVERY_S = 5.0


class Batch:
    """Takes a run for each goal as far as it goes, each safely, whatever the others do.

    `read` makes a run id and a goal of an item, or raises `UsageError`; `contract` makes the contract of a goal for a
    run as it is stored; `model` is who proposes under a contract.
    """

    def __init__(
        self,
        runs: Runs,
        pool: Pool,
        read: Callable[[Goal], tuple[str, dict[str, Any]]],
        contract: Callable[[Run | None, Mapping[str, Any]], Contract],
        model: Callable[[Contract], Model],
    ) -> None:
        self._runs = runs
        self._pool = pool
        self._read = read
        self._contract = contract
        self._model = model
        self._under_way: dict[str, asyncio.Event] = {}

    async def run(
        self, goals: AsyncIterable[Goal], concurrency: int, permit: bool, stop: asyncio.Event
    ) -> AsyncIterator[dict[str, Any]]:
        """The report of each goal's run with its `line`, in the order of completion.

        Raises:
            PoolExhausted: the server ended again and again.
        """

        async def one(numbered: tuple[int, Goal]) -> dict[str, Any]:
            return {"line": numbered[0]} | await self._one(numbered[1], permit, stop)

        async for result in in_flight(_numbered(goals), one, concurrency, stop):
            yield result

    async def _one(self, item: Goal, permit: bool, stop: asyncio.Event) -> dict[str, Any]:
        run_id = ""
        try:
            run_id, goal = self._read(item)
            while other := self._under_way.get(run_id):  # twice in one batch: the second finds it ended
                await other.wait()
            self._under_way[run_id] = asyncio.Event()
            try:
                await self._take_further(run_id, goal, permit, stop)
            finally:
                self._under_way.pop(run_id).set()
        except PoolExhausted:
            raise
        except (UsageError, ContractMismatch) as error:
            return nothing(run_id, "not opened", error)
        except HarnessError as error:
            return report(self._runs, run_id, error, permit=permit)
        return report(self._runs, run_id, permit=permit)

    async def _take_further(self, run_id: str, goal: Mapping[str, Any], permit: bool, stop: asyncio.Event) -> None:
        for servers in range(1, SERVERS_FOR_A_RUN + 1):
            stored = self._runs.get(run_id)
            contract = self._contract(stored, goal)
            if stored and stored.state in FINAL:
                refuse_other(stored, contract)
                return
            tool = await self._pool.tool()
            opened = await self._runs.open(run_id, contract)
            try:
                await drive(self._runs, opened, Ports(self._model(contract), tool, stop), permit)
            except ToolUnavailable:  # if its server died, the run goes on with the next one: it looks up first
                if servers == SERVERS_FOR_A_RUN or not await tool.session.dies():
                    raise
            else:
                self._pool.praise(tool)
                return


async def _numbered(goals: AsyncIterable[Goal]) -> AsyncIterator[tuple[int, Goal]]:
    """The goals with their numbers from 1; a blank line is counted and passed over."""
    number = 0
    async for goal in goals:
        number += 1
        if not isinstance(goal, str) or goal.strip():
            yield number, goal


async def in_flight(
    items: AsyncIterator[T], work: Callable[[T], Awaitable[R]], limit: int, stop: asyncio.Event
) -> AsyncIterator[R]:
    """What `work` returns for each item, in the order of completion, with at most `limit` of them under way.

    An item is taken when there is a place for it, so memory does not grow with their number. Once `stop` is set none
    is taken any more, and what is under way is waited for. An exception of `work` ends everything.
    """
    coming: asyncio.Future[T] | None = None
    stopping = asyncio.ensure_future(stop.wait())
    running: set[asyncio.Future[R]] = set()
    more = True
    try:
        while running or (more and not stop.is_set()):
            waiting: set[asyncio.Future[Any]] = {*running}
            if more and not stop.is_set():
                if coming is None and len(running) < limit:
                    coming = asyncio.ensure_future(anext(items))
                waiting |= {coming, stopping} if coming else set()
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if coming in done:
                try:
                    running.add(asyncio.ensure_future(work(coming.result())))
                except StopAsyncIteration:
                    more = False
                coming = None
            for task in [task for task in running if task in done]:
                running.remove(task)
                yield task.result()
    finally:
        left: list[asyncio.Future[Any]] = [*running, stopping, *([coming] if coming else [])]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


# -- for a person -----------------------------------------------------------------------------------------------------


async def lines(file: IO[str]) -> AsyncIterator[str]:
    """The lines of a file; one that can be slow, a pipe or a terminal, holds nobody up.

    It is not closed: a reader that waits for the next line holds its lock.
    """
    while line := file.readline() if file.seekable() else await in_a_thread(file.readline):
        yield line


async def tell(results: AsyncIterator[dict[str, Any]], file: Any, as_json: bool) -> int:
    """Tell how a batch goes on standard error, and its results or their table on standard output.

    Returns the exit code: 1 when a line was bad or a run ended badly, otherwise 75 or 3 when one can or must go on.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    size, read = (os.fstat(file.fileno()).st_size, file.buffer.tell) if file.seekable() else (None, lambda: 0)
    console = Console(stderr=True)
    counts: Counter[str] = Counter()
    following: dict[str, str] = {}
    codes: set[int] = set()
    began = told_at = time.monotonic()
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=size)
            async for result in results:
                _tell_one(result, as_json)
                codes.add(exit_code(result))
                counts[_heading(result)] += 1
                if result["next"] and result["next"]["action"] != "none":
                    following.setdefault(_heading(result), result["next"]["command"])
                now = time.monotonic()
                rate = f"{counts.total()} done, {counts.total() / (now - began):.0f}/s"
                bar.update(task, completed=read(), description=rate)
                if not console.is_terminal and now - told_at > TOLD_EVERY_S:
                    told_at = now
                    console.print(rate)
    finally:
        print(_table(counts, following, time.monotonic() - began), file=sys.stderr if as_json else sys.stdout)
    return ENDED_BADLY if codes & {ENDED_BADLY, USAGE} else max(codes & {NEEDS_A_PERSON, TRY_AGAIN}, default=OK)


def _tell_one(result: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, ensure_ascii=False), flush=True)
    told = result["interrupted"]
    if told and told["error"] != Interrupted.__name__:
        print(f"line {result['line']}: {told['error']}: {told['message']}", file=sys.stderr)


def _heading(result: Mapping[str, Any]) -> str:
    return f"{result['state'] or 'refused'}{', stopped early' if result['interrupted'] and result['state'] else ''}"


def _table(counts: Counter[str], following: Mapping[str, str], took_s: float) -> str:
    """The counts, and for those who can go on the next command of one of them."""
    rows = [f"{heading:<34} {number:>9}" for heading, number in sorted(counts.items())]
    rows += [f"  next for one that is {heading}: {command}" for heading, command in following.items()]
    rows.append(f"{'all':<34} {counts.total():>9}   in {took_s:.1f} s, {counts.total() / max(took_s, 1e-9):.0f}/s")
    return "\n".join(rows)
