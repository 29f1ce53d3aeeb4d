"""The loop: the only place where machine, journal and the outside meet.

Knows no tool protocol and no model provider; they come in through two ports.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from miniharness.errors import CannotTell, Interrupted, ModelUnavailable, ProposalRejected
from miniharness.machine import AskModel, Decide, Dispatch, Event, EventType, LookUp, Outcome, Run, Step, next_step
from miniharness.runs import Runs

MODEL_TIMEOUT_S = 120.0  # for one request in all, however slowly its bytes arrive

Json = Mapping[str, Any]
T = TypeVar("T")
Model = Callable[[Json], Awaitable[tuple[Json, Json]]]
"""Takes the goal, asks once, and returns the validated action and the response's metadata; does not hold the loop up.

Raises:
    ModelUnavailable: no answer; asking again can help.
    ProposalRejected: an answer that is no acceptable proposal, or a request that can never get one.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of one dispatch; `message` is for the history, so it holds no secrets."""

    outcome: Outcome
    message: str = ""


class Tool(Protocol):
    """The write tool and its look-up."""

    async def connect(self) -> Json:
        """Make the tool ready; returns what the history should know of it (protocol version, server).

        Raises:
            ToolUnavailable: it cannot be used now, or is not the tool that was expected.
        """

    async def look_up(self, key: str, epoch: int) -> Json | None:
        """The resource `{"id", "action"}` of that operation key, or None when it is not there.

        Raises:
            CannotTell: nobody ever can.
            ToolUnavailable: nobody can now.
        """

    async def dispatch(self, key: str, action: Json, epoch: int) -> Answer:
        """Send the write, once on the wire. Never raises for a failed call: that is an unknown outcome."""


class Ports:
    """The outside, one step at a time; once `stop` is set, no step begins but one whose debit is on disk."""

    def __init__(self, model: Model, tool: Tool, stop: asyncio.Event | None = None) -> None:
        self._model = model
        self._tool = tool
        self._stop = stop
        self._connected = False

    async def perform(self, step: Step) -> Event:
        """Do what the step says, once, and return what happened."""
        if self._stop and self._stop.is_set() and isinstance(step, Decide | LookUp):
            raise Interrupted("stopped between two steps")
        match step:
            case Decide(event):
                return event
            case AskModel(goal):
                return await self._ask(goal)
            case LookUp() | Dispatch() if not self._connected:  # the machine will ask for the same step again
                info = await self._tool.connect()
                self._connected = True
                return Event(EventType.CONNECTED, info)
            case LookUp():
                return await self._look_up(step)
            case Dispatch(key, epoch, action):
                answer = await self._tool.dispatch(key, action, epoch)
                return Event(EventType.DISPATCH_ANSWERED, {"outcome": answer.outcome, "message": answer.message})
            case _:
                raise AssertionError(f"{step} is not a step to perform")

    async def _look_up(self, step: LookUp) -> Event:
        known: dict[str, Any]
        try:
            known = {"found": await self._tool.look_up(step.key, step.epoch)}
        except CannotTell as error:
            known = {"found": None, "unknown": str(error)}
        settled = {"settled": True} if step.settled else {}
        return Event(EventType.LOOKED_UP, {"key": step.key} | known | settled)

    async def _ask(self, goal: Json) -> Event:
        try:
            async with asyncio.timeout(MODEL_TIMEOUT_S):
                proposal, metadata = await self._model(goal)
        except ProposalRejected as error:
            return Event(EventType.PROPOSAL_REJECTED, {"reason": str(error)})
        except TimeoutError:
            raise ModelUnavailable(f"the model did not answer within {MODEL_TIMEOUT_S:g} s; try later") from None
        return Event(EventType.PROPOSED, {"proposal": proposal, "metadata": metadata})


async def in_a_thread(ask: Callable[..., T], *about: Any) -> T:
    """Ask in a daemon thread: an interrupted command does not wait for an answer that nobody will read."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # so that a late answer finds its place even when nobody waits

    def work() -> None:
        try:
            future.set_result(ask(*about))
        except BaseException as error:  # whatever it was, it belongs to the one who waits
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(future)


async def drive(runs: Runs, run: Run, ports: Ports, permit: bool, now: Callable[[], float] = time.time) -> Run:
    """Take a run that `runs.open` returned as far as it goes: to an end, or to where a person has to decide.

    Raises:
        HarnessError: it stopped early; the journal says how far it came, and opening it again continues from there.
    """
    try:
        await asyncio.sleep(0)  # who was opened at the same time gets a turn, and then they share commits
        while not (step := next_step(run, permit, now())).halts:
            event = await ports.perform(step)
            run = await runs.record(run, event)
        return run
    except ModelUnavailable as stop:
        await runs.record(run, Event(EventType.MODEL_FAILED, {"message": str(stop)}))
        raise
    finally:
        runs.leave(run)
