"""Resource against goal: the only judge of success. Reads nothing that the model or the write call said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miniharness.contract import canonical

Differences = dict[str, dict[str, Any]]


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Differences:
    """Each field whose JSON value differs: `{field: {"found": ..., "wanted": ...}}`; empty when they are equal.

    A field that only one side has counts, with the other side shown as null. 1, 1.0 and true are three values.
    """
    return {
        field: {"found": found.get(field), "wanted": wanted.get(field)}
        for field in sorted(found.keys() | wanted.keys())
        if (field in found) != (field in wanted) or canonical(found[field]) != canonical(wanted[field])
    }


def describe(found: Differences) -> str:
    """The differences as one line for a person."""
    return "; ".join(f"{f} is {canonical(d['found'])}, wanted {canonical(d['wanted'])}" for f, d in found.items())
