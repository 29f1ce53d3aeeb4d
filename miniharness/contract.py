"""What a run is bound to from its first moment on, and the rules that text from outside has to keep.

Knows no state, no storage and no tool.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miniharness.errors import UsageError

IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TEXT_LIMIT = 300  # Unicode code points


canonical: Callable[[Any], str] = json.JSONEncoder(
    ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
).encode
"""The one JSON text of a value: sorted keys, no spaces, no escapes; equal texts mean equal values."""


def digest(text: str) -> str:
    """SHA-256 of the UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def text_fault(value: object) -> str | None:
    """Why `value` is not acceptable text, or None when it is: the one rule for goals, proposals and the server.

    Text is a string of 1 to 300 code points with something to see in it, and without control characters and line
    breaks (Unicode categories Cc, Zl, Zp) or lone surrogates (Cs). Something to see is any code point that is neither
    white space (`str.isspace`) nor an invisible format character (Cf). Nothing is trimmed or normalised.
    """
    if not isinstance(value, str):
        return f"must be text, not {type(value).__name__}"
    if len(value) > TEXT_LIMIT:
        return f"has {len(value)} characters; at most {TEXT_LIMIT} are allowed"
    categories = {unicodedata.category(c) for c in value}
    if "Cs" in categories:
        return "holds half of a surrogate pair, which is not a character"
    if categories & {"Cc", "Zl", "Zp"}:
        return "holds a control character (such as NUL, tab or a line break)"
    if all(c.isspace() or unicodedata.category(c) == "Cf" for c in value):
        return "is empty or only white space"
    return None


def check_identifier(value: str) -> str:
    """Return `value` if it can name a run: 1 to 64 of A-Z a-z 0-9 . _ - and a letter or digit first.

    Raises:
        UsageError: it cannot; names the rule.
    """
    if not IDENTIFIER.fullmatch(value):
        shown = ascii(value if len(value) <= 80 else value[:77] + "...")
        raise UsageError(
            f"the run id {shown} is not allowed: use 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit"
        )
    return value


def _plain(part: Any) -> dict[str, Any]:
    return {name: getattr(part, name) for name in part.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How often the run may reach outside; each is debited on disk before the request it pays for.

    Raises:
        UsageError: a limit is not a whole number from 1 to 1000.
    """

    dispatches: int = 3
    model_requests: int = 5

    def __post_init__(self) -> None:
        for name, value in _plain(self).items():
            if type(value) is not int or not 1 <= value <= 1000:
                raise UsageError(f"the budget's {name} must be a whole number from 1 to 1000, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """What the operator declares of the write tool; nothing here is taken from the server's own word."""

    name: str
    resource: str  # what one operation creates; the last part of the operation key
    server: str = "stdio"  # where its effects go: our own child, or the URL of a running server
    fences: bool  # a look-up with a higher epoch makes the server refuse every older request
    deduplicates: bool  # a second request with the same key has no second effect
    settles_after_s: float | None = None  # how long after its dispatch a write can still land, where that is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Goal, permitted tool, model, budgets and deadline of one run, frozen when the run opens.

    Raises:
        UsageError: names the field that is of another type, not JSON, or not finite.
    """

    goal: dict[str, Any]  # field -> value that the resource must have
    arguments: dict[str, Any] | None = None  # what the write is given, where that is not the goal itself
    tool: Tool
    provider: str
    model: str
    budget: Budget = Budget()
    deadline: float | None = None  # seconds since 1970; after it no model request and no dispatch begins
    command: str  # what a person types to take the run further, without its flags

    def __post_init__(self) -> None:
        kinds = {"goal": dict, "tool": Tool, "provider": str, "model": str, "budget": Budget, "command": str}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise UsageError(f"the contract's {name} must be of type {kind.__name__}")
        for name in ("goal", "arguments"):
            try:
                canonical(getattr(self, name)).encode()
            except (TypeError, ValueError) as error:
                raise UsageError(f"the contract's {name} must be JSON: {error}") from error
        if self.deadline is not None and not (type(self.deadline) is float and math.isfinite(self.deadline)):
            raise UsageError(f"the contract's deadline must be a float, not {self.deadline!r}")

    @property
    def action(self) -> dict[str, Any]:
        """What the write must be given; a proposal that differs is refused."""
        return self.goal if self.arguments is None else self.arguments

    def plain(self) -> dict[str, Any]:
        """The contract as a JSON object."""
        return _plain(self) | {"tool": _plain(self.tool), "budget": _plain(self.budget)}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Contract:
        """The contract that `plain` was made of.

        Raises:
            TypeError, KeyError, UsageError: it was made of none.
        """
        return cls(**{**plain, "tool": Tool(**plain["tool"]), "budget": Budget(**plain["budget"])})

    def fields(self) -> dict[str, Any]:
        """Every field by its dotted name, for comparing two contracts."""
        flat: dict[str, Any] = {}
        for name, value in self.plain().items():
            if isinstance(value, dict):
                flat |= {f"{name}.{inner}": item for inner, item in value.items()}
            else:
                flat[name] = value
        return flat
