"""Approvals: what a person is shown, and what their word is bound to.

An approval is an event in the history of its run, and is used up by the intent to dispatch, in the same transaction.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miniharness.contract import Contract, canonical, digest
from miniharness.engine import Json
from miniharness.errors import UsageError
from miniharness.machine import Event, EventType, Run
from miniharness.runs import Runs
from miniharness.tools import config
from miniharness.tools.names import agents_run
from miniharness.tools.paths import PathRule
from miniharness.tools.rules import Call

DAY_S = 86400.0
INVISIBLE = {"Cc", "Cf", "Zl", "Zp", "Co", "Cn"}


def binding(run: Run, arguments: Json, definition: Json, policy: str, people: config.Approvals) -> dict[str, Any]:
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
        "answered_by": people.by,
        "days": people.days,
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
    return Event(EventType.APPROVAL_ASKED, detail | {"expires_at": now + bound["days"] * DAY_S})


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


def may_answer(question: Json, by: str) -> bool:
    """Whether this person may answer it; where nobody is named, everybody may."""
    people = question["bound"]["answered_by"]
    return not people or by in people


def approve(runs: Runs, run: Run, by: str, trust: Json | None = None) -> Run:
    """Record a person's yes to the question that `run` asks, with who said it and from where.

    `trust` is a yes to more than this one write, made by `trust_in`.

    Raises:
        IllegalMove: it asks none, or another one by now.
    """
    wanted = run.approval["digest"] if run.approval else ""
    detail = {"digest": wanted, "by": by, "from": f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"}
    detail |= {"trust": dict(trust)} if trust else {}
    return runs.request(run.id, Event(EventType.APPROVED, detail), while_driven=True)


def trust_in(runs: Runs, run: Run, paths: Sequence[str]) -> dict[str, Any]:
    """What a yes for the whole of an agent's run covers: the tool that `run` is about to call, as it is now.

    With `paths`, gitignore patterns below the working directory, only where every path of a call is within them.

    Raises:
        UsageError: the call belongs to no agent's run, or asks nothing.
    """
    bound, within = (question(runs, run) or {}).get("bound"), agents_run(run.id)
    if bound is None or within is None:
        raise UsageError(
            f"run {run.id} is no call within an agent's run: approve it without --for-session, or make such calls with "
            "call --within RUN"
        )
    anchored = [path if path.startswith(("//", "~/")) else f"/{Path.cwd() / path.removeprefix('/')}" for path in paths]
    same = {name: bound[name] for name in ("tool", "server", "definition")}
    return {"within": within, **same, "paths": anchored, "days": bound["days"]}


def trusted(runs: Runs, run_id: str, bound: Json, call: Call, now: float) -> str | None:
    """Who trusts the tool within the agent's run of this call; None when nobody does."""
    within = agents_run(run_id)
    if call.shell:  # what a command does is no path
        return None
    for event in runs.recorded(EventType.APPROVED, within) if within else ():
        trust = event.detail.get("trust")
        if trust and all(trust[name] == bound[name] for name in ("tool", "server", "definition")):
            rules = [PathRule.of(pattern, Path("/"), denies=False) for pattern in trust["paths"]]
            covered = all(any(rule.matches(path) for rule in rules) for _, path in call.paths)
            if (not rules or (call.paths and covered)) and now < event.at / 1000 + trust["days"] * DAY_S:
                return str(event.detail["by"])
    return None
