"""What a run is bound to from its first moment on, and the rules that text from outside has to keep.

Knows no state, no storage and no tool.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from miniharness.errors import UsageError

IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TEXT_LIMIT = 300  # Unicode code points


def canonical(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, no escapes; equal texts mean equal values."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


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


def check_identifier(field: str, value: str) -> str:
    """Return `value` if it can name a run: 1 to 64 of A-Z a-z 0-9 . _ - and a letter or digit first.

    Raises:
        UsageError: it cannot; names the field and the rule.
    """
    if not IDENTIFIER.fullmatch(value):
        shown = ascii(value if len(value) <= 80 else value[:77] + "...")
        raise UsageError(
            f"{field} {shown} is not allowed: use 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit"
        )
    return value


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Budget(_Frozen):
    """How often the run may reach outside; each is debited on disk before the request it pays for."""

    dispatches: int = Field(default=3, ge=1, le=1000)
    model_requests: int = Field(default=5, ge=1, le=1000)


class Tool(_Frozen):
    """What the operator declares of the write tool; nothing here is taken from the server's own word."""

    name: str
    resource: str  # what one operation creates; the last part of the operation key
    fences: bool  # a look-up with a higher epoch makes the server refuse every older request
    deduplicates: bool  # a second request with the same key has no second effect


class Contract(_Frozen):
    """Goal, permitted tool, model, budgets and deadline of one run, frozen when the run opens."""

    goal: dict[str, JsonValue]  # field -> value that the resource must have
    tool: Tool
    provider: str
    model: str
    budget: Budget = Budget()
    deadline: float | None = Field(
        default=None, allow_inf_nan=False
    )  # seconds since 1970; after it no model request and no dispatch begins
    command: str  # what a person types to take the run further, without its flags

    def fields(self) -> dict[str, Any]:
        """Every field by its dotted name, for comparing two contracts."""
        flat: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json").items():
            if isinstance(value, dict):
                flat |= {f"{name}.{inner}": item for inner, item in value.items()}
            else:
                flat[name] = value
        return flat
