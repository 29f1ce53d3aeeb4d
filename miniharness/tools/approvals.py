"""Approvals: what a person is shown, and what their word is bound to.

An approval is an event in the history of its run, and is used up by the intent to dispatch, in the same transaction.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import unicodedata
from collections.abc import Mapping
from typing import Any

from miniharness.contract import Contract, canonical, digest
from miniharness.machine import Event, EventType, Run
from miniharness.runs import Runs

LIVES_S = 7 * 86400.0
INVISIBLE = {"Cc", "Cf", "Zl", "Zp", "Co", "Cn"}


def binding(run: Run, arguments: Mapping[str, Any], definition: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """Everything that an approval of this run's write covers; if any of it changes, it is void.

    `arguments` are those that will be sent, `definition` what the server says of the tool, `policy` the rules' digest.
    """
    contract: Contract = run.contract
    return {
        "run": run.id,
        "key": run.key,
        "tool": contract.tool.name,
        "server": contract.tool.server,
        "definition": digest(canonical(definition)),
        "arguments": digest(canonical(arguments)),
        "goal": digest(canonical(contract.goal)),
        "dispatches": run.dispatches_limit,
        "policy": policy,
    }


def shown(tool: str, server: str, arguments: Mapping[str, Any]) -> str:
    """The call as a person is shown it: the very JSON that will be sent, with what cannot be seen escaped."""
    text = json.dumps(arguments, ensure_ascii=False, sort_keys=True, indent=2)
    visible = "".join(c if c == "\n" or unicodedata.category(c) not in INVISIBLE else _escaped(c) for c in text)
    return f"{tool} on {server}\n{visible}"


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1]


def ask(bound: Mapping[str, Any], text: str, why: str, now: float) -> Event:
    """The question, for the history."""
    detail = {"digest": digest(canonical(bound)), "bound": dict(bound), "shown": text, "why": why}
    return Event(EventType.APPROVAL_ASKED, detail | {"expires_at": now + LIVES_S})


def void(runs: Runs, run: Run, bound: Mapping[str, Any], now: float) -> Event | None:
    """Why the approval that this run has, or asks for, counts no more; None when it does, or there is none."""
    if run.approval is None:
        return None
    if run.approval["digest"] != digest(canonical(bound)):
        asked = (question(runs, run) or {}).get("bound", {})
        changed = ", ".join(name for name, value in bound.items() if asked.get(name) != value)
        return Event(EventType.APPROVAL_VOIDED, {"why": f"what the approval was bound to has changed: {changed}"})
    if now >= run.approval["expires_at"]:
        return Event(EventType.APPROVAL_VOIDED, {"why": "the approval has expired"})
    return None


def question(runs: Runs, run: Run) -> dict[str, Any] | None:
    """The detail of the question that this run asks; None when it asks none."""
    if run.approval is None:
        return None
    wanted = run.approval["digest"]
    asked = (e.detail for e in reversed(runs.events(run.id)) if e.type is EventType.APPROVAL_ASKED)
    return next((dict(detail) for detail in asked if detail["digest"] == wanted), None)


def approve(runs: Runs, run: Run, by: str) -> Run:
    """Record a person's yes to the question that `run` asks, with who said it and from where.

    Raises:
        IllegalMove: it asks none, or another one by now.
    """
    wanted = run.approval["digest"] if run.approval else ""
    detail = {"digest": wanted, "by": by, "from": f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"}
    return runs.request(run.id, Event(EventType.APPROVED, detail), while_driven=True)
