"""How a command is interrupted: the first SIGINT or SIGTERM asks it to stop, a second one ends it at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from miniharness.errors import Interrupted

STOPS = {signal.SIGINT, signal.SIGTERM}

T = TypeVar("T")


def hold() -> None:
    """Let signals wait until somebody hears them, so that none interrupts an import."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def heard(stop: Callable[[], object]) -> list[str]:
    """Call `stop` at the first signal; a second one ends the process. Returns the names of those that came so far."""
    import asyncio

    received: list[str] = []

    def hear(number: signal.Signals) -> None:
        if received:
            os._exit(Interrupted.exit_code)
        received.append(number.name)
        stop()

    for number in STOPS:
        asyncio.get_running_loop().add_signal_handler(number, hear, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    return received


async def obeyed(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; a signal cancels it.

    Raises:
        Interrupted: names the signal.
    """
    import asyncio

    task = asyncio.ensure_future(work)
    received = heard(task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise Interrupted(f"interrupted by {received[0]}") from None


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's `work`, without the log lines of the SDKs: what matters of them is in our errors."""
    import asyncio
    import logging

    logging.basicConfig(handlers=[logging.NullHandler()])
    return asyncio.run(work)
