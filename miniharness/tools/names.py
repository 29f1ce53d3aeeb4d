"""How the run of a call is named: after what it does, and after the agent's run that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miniharness.contract import canonical, digest


def operation(full_name: str, arguments: Mapping[str, Any], within: str | None = None) -> str:
    """The run of a call that names none: equal arguments are one operation, within the agent's run or alone."""
    name = digest(canonical([full_name, arguments]))[:12]
    return f"{within}.{name}" if within else f"call-{name}"


def agents_run(run_id: str) -> str | None:
    """The agent's run that a call belongs to: what stands before the last dot of its own."""
    return run_id.rpartition(".")[0] or None
