"""What every transport shares: the limits, and the record of whether a request may have left."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

EPOCH_META = "io.github.miniharness/epoch"
KEY_META = "io.github.miniharness/operation-key"
"""What a request carries in its `_meta` beside its arguments; MCP has no words of its own for either."""

RECOVERABLE = "io.github.miniharness/recoverable"
VERSION = 1  # of that extension
OUTCOME_METHOD = "io.github.miniharness/outcome"
REPLAYED_META = "io.github.miniharness/replayed"
"""The extension of docs/recoverable-tools.md, also in the `_meta` of its tools; its method; the mark of a replay."""

TOKEN = "MINIHARNESS_TOKEN"
"""The environment variable with the bearer token of an HTTP server, for both sides."""


@dataclass(frozen=True, slots=True)
class Limits:
    """No wait without a limit, no memory without a limit."""

    handshake_s: float = 20.0  # from the first byte to the list of tools; the child may still be starting
    write_s: float = 5.0  # until the server has taken a request off the pipe
    read_s: float = 30.0  # from the request to its answer
    close_s: float = 2.0  # for each of: leaving on its own, after SIGTERM, after SIGKILL
    reply_bytes: int = 8 << 20  # of one answer


@dataclass(slots=True)
class Request:
    """One request on its way."""

    sent: bool = False  # true as soon as a byte of it may have reached the server
    fault: str = ""  # why its answer was cut off, if we did that


CURRENT: ContextVar[Request] = ContextVar("request")
"""The request of the task at hand; the SDK hands messages to the transport inside the caller's context."""


def mark_sent() -> None:
    """From here on the request may have arrived."""
    if request := CURRENT.get(None):
        request.sent = True


def mark_fault(fault: str) -> None:
    """The answer to the request is not read to its end, and this is why."""
    if request := CURRENT.get(None):
        request.fault = fault
