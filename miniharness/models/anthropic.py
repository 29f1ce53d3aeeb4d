"""The Anthropic Messages API through the official SDK: one request, no retry, every failure with whose turn it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from miniharness.errors import ModelUnavailable, ProposalRejected, UsageError

TIMEOUT_S = 60.0
KEY = "ANTHROPIC_API_KEY"

_TURN = {
    401: "the API key was refused: check " + KEY,
    402: "the account has to pay first: check its billing",
    403: "the API key may not do this: check its permissions",
    429: "the provider asks to slow down",
    529: "the provider is overloaded",
}
"""What a person should know of a status that can be mended or passes by; other 4xx never lead to an answer."""


def require_key() -> None:
    """Check that there is a key before anything is debited.

    Raises:
        UsageError: there is none.
    """
    if not os.environ.get(KEY):
        raise UsageError(f"--provider anthropic needs a key in the environment variable {KEY}")


def respond(request: Mapping[str, Any]) -> dict[str, Any]:
    """Send `request` (the keyword arguments of `messages.create`) once and return the response as JSON.

    Raises:
        ModelUnavailable: no answer; asking again can help, perhaps after a person mended something.
        ProposalRejected: the provider refused the request itself; asking again cannot help.
        UsageError: there is no key.
    """
    require_key()
    import anthropic

    try:
        with anthropic.Anthropic(max_retries=0, timeout=TIMEOUT_S) as client:
            message = client.messages.create(**request)
    except anthropic.APIStatusError as error:
        raise _refused(error.status_code, error.response.headers, error.request_id) from error
    except anthropic.APITimeoutError as error:
        raise ModelUnavailable(f"the provider did not answer within {TIMEOUT_S:g} s; try later") from error
    except anthropic.AnthropicError as error:  # no connection, a connection that broke off, an unreadable answer
        raise ModelUnavailable(f"the provider was not reached ({type(error).__name__}); try later") from error
    except (ValueError, RecursionError) as error:
        raise ModelUnavailable("the provider answered with something that is not JSON; try later") from error
    if not isinstance(message, anthropic.types.Message):
        raise ModelUnavailable("something answered in the provider's place, not with a message; try later")
    return message.model_dump(mode="json", warnings="none")


def _refused(status: int, headers: Mapping[str, str], request_id: str | None) -> ModelUnavailable | ProposalRejected:
    """The error for a status; the body is left out, it can quote what was sent."""
    traced = f" (HTTP {status}, request {request_id})" if request_id else f" (HTTP {status})"
    if status in _TURN or status >= 500 or status in (408, 409):
        wait = headers.get("retry-after")
        after = f"; try again after {wait} s" if wait and wait.isdigit() else "; then try again"
        return ModelUnavailable(_TURN.get(status, "the provider failed") + after + traced)
    if status == 404:
        return ProposalRejected(
            "the provider does not know this model; start another run with another --model" + traced
        )
    return ProposalRejected("the provider refused the request itself" + traced)
