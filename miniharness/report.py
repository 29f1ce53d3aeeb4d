"""What a person or a program is told about a run: one JSON object, the next command to type, and a text to read."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from miniharness import errors
from miniharness.errors import ENDED_BADLY, NEEDS_A_PERSON, OK, HarnessError, Interrupted, RunBusy, StoreError
from miniharness.machine import CERTAIN, FINAL, Event, EventType, Run, State
from miniharness.runs import Recorded, Runs, chain_faults

EXIT_CODES = {State.RECONCILE_REQUIRED: NEEDS_A_PERSON, State.FAILED: ENDED_BADLY, State.CANCELLED: ENDED_BADLY}


def report(runs: Runs, run_id: str, error: HarnessError | None = None, *, permit: bool = False) -> dict[str, Any]:
    """The run as it stands on disk, its history, and the next step; all values are plain JSON.

    `error` is why a command stopped early. `permit` says whether that command had one, so that the next is given alike.
    """
    run = runs.get(run_id)
    if run and run.state in FINAL and isinstance(error, Interrupted):
        error = None  # the signal came when everything was done
    if run is None:
        return nothing(run_id, "there is no such run yet", error)
    events = runs.events(run_id)
    if not run.pruned and (faults := chain_faults(run, events)):  # not to be told as if it were true
        raise StoreError(f"run {run_id}: {faults[0]}; keep the file and restore a backup")
    budget, noun = run.contract.budget, run.contract.tool.resource
    busy = isinstance(error, RunBusy) or runs.driven_elsewhere(run)
    return {
        "run": run.id,
        "state": run.state.value,
        "reason": run.reason,
        "certain": certain(run),
        "attempts": run.dispatches_spent,
        "budget": {
            "dispatches": {"spent": run.dispatches_spent, "limit": run.dispatches_limit},
            "model_requests": {"spent": run.model_requests_spent, "limit": budget.model_requests},
        },
        "proposal": run.proposal,
        "metadata": run.metadata,
        noun: run.resource,
        "events": [_plain(event) for event in events],
        "next": next_command(run, runs.folder, busy=busy, permit=permit),
        "interrupted": _interrupted(error),
    }


def nothing(run_id: str, reason: str, error: HarnessError | None) -> dict[str, Any]:
    """The report where there is no run to report."""
    shape: dict[str, Any] = {"attempts": 0, "budget": None, "proposal": None, "metadata": None, "events": []}
    return {"run": run_id, "state": None, "reason": reason, **shape, "next": None, "interrupted": _interrupted(error)}


def _interrupted(error: HarnessError | None) -> dict[str, str] | None:
    return {"error": type(error).__name__, "message": str(error)} if error else None


def _plain(event: Recorded) -> dict[str, Any]:
    return {
        "seq": event.seq,
        "at": _time(event.at),
        "epoch": event.epoch,
        "type": event.type.value,
        "detail": dict(event.detail),
    }


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def certain(run: Run) -> str:
    """What is certainly true of the run."""
    if run.settled_by:
        return f"{run.settled_by} ended this run by their word; no check confirmed it"
    before = run.state is State.SUCCEEDED and not run.dispatches_spent
    told = CERTAIN[run.state] + ("; it was there before, and nothing was sent" if before else "")
    return told + ("; its history was pruned" if run.pruned else "")


def next_command(run: Run, folder: Path, *, busy: bool = False, permit: bool = False) -> dict[str, str]:
    """What to do next, `{"action", "command"}`: none, wait, execute, approve, resume, ask_operator or settle.

    `wait` can say `until` when. `settle` is a person's verdict after they looked for themselves: `command` is for what
    is not there, `or` for what is.
    """
    where = shlex.quote(_shown(folder))
    operate = f"python -m miniharness --state-dir {where}"
    resume = f"{run.contract.command} --state-dir {where} --run {run.id}"
    if not run.contract.command:  # a program's own call
        resume = "run the program again that made this call"
    if run.state in FINAL:
        return {"action": "none", "command": f"{operate} replay {run.id}"}
    execute = f"{resume} --execute" if run.contract.command else resume
    alike = execute if permit else resume
    if busy:
        return {"action": "wait", "command": alike}
    if run.state is State.WAITING_EXECUTION and not run.cancel and run.approval:
        approve = {"action": "approve", "command": f"{operate} approve {run.id} --by NAME"}
        return approve if run.approval["by"] is None else {"action": "execute", "command": resume}
    if run.state is State.WAITING_EXECUTION and not run.cancel:
        return {"action": "execute", "command": execute}
    if run.state is not State.RECONCILE_REQUIRED or (run.cancel and run.looked != run.epoch):
        return {"action": "resume", "command": alike}
    if run.may_dispatch and run.looked != run.epoch:  # an operator granted more
        return {"action": "execute", "command": execute}
    if run.settles and not run.conclusive:
        after_s = run.contract.tool.settles_after_s or 0.0
        return {"action": "wait", "command": alike, "until": _time(run.ended_at + int(after_s * 1000))}
    word = "--by NAME --why REASON"
    if run.conclusive:
        return {"action": "ask_operator", "command": f"{operate} grant {run.id} --dispatches 1 {word}"}
    settle = f"{operate} settle {run.id} --as"
    return {"action": "settle", "command": f"{settle} failed {word}", "or": f"{settle} succeeded {word}"}


def _shown(folder: Path) -> str:
    """The folder as a person types it: relative while it lies below the working directory."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)


def exit_code(result: Mapping[str, Any]) -> int:
    """The command's exit code: 0 means done as asked."""
    if stopped := result["interrupted"]:
        return int(getattr(errors, stopped["error"]).exit_code)
    return EXIT_CODES.get(State(result["state"]), OK)


def summary(result: Mapping[str, Any], noun: str) -> str:
    """The report as a text that a person likes to read."""
    lines = [f"run       {result['run']}"]
    if result["state"] is None:
        lines.append(f"state     none: {result['reason']}")
    else:
        spent = result["budget"]["dispatches"]
        lines += [
            f"state     {result['state']}" + (f": {result['reason']}" if result["reason"] else ""),
            f"certain   {result['certain']}",
            f"{noun:<9} {_told_resource(result[noun])}",
            f"attempts  {result['attempts']} of {spent['limit']}",
            "",
            *_timeline(result["events"]),
            "",
        ]
    if stopped := result["interrupted"]:
        lines.append(f"stopped   {stopped['error']}: {stopped['message']}")
    if following := result["next"]:
        if "until" in following:
            lines.append(f"wait      until {following['until']}, then the same command goes on")
        if "or" in following:
            lines += [
                "look      for yourself what is there. If it is there:",
                f"next      {following['or']}",
                "If not:",
            ]
        lines.append(f"next      {following['command']}")
    return "\n".join(lines)


def _told_resource(resource: Mapping[str, Any] | None) -> str:
    if resource is None:
        return "none seen"
    return f"{resource['id']}  " + ", ".join(f"{field}: {value}" for field, value in resource["action"].items())


def _timeline(events: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [(e["at"].replace("T", " "), e["epoch"], e["type"], _told(Event(e["type"], e["detail"]))) for e in events]
    return [f"  {at}  e{epoch:<3} {kind:<18} {told}".rstrip() for at, epoch, kind, told in rows]


def _told(event: Event) -> str:
    """The part of an event that a person wants on one line."""
    detail = event.detail
    match event.type:
        case EventType.LOOKED_UP:
            absent = detail.get("unknown", "nothing there")
            return absent if detail["found"] is None else f"found {_told_resource(detail['found'])}"
        case EventType.PROPOSED:
            return ", ".join(f"{field}: {value}" for field, value in detail["proposal"].items())
        case EventType.DISPATCH_ANSWERED:
            return f"{detail['outcome']} {detail['message']}"
        case EventType.DISPATCH_INTENDED:
            return f"attempt {detail['attempt']}"
        case EventType.APPROVAL_ASKED:
            return str(detail["why"])
        case EventType.APPROVED:
            return f"by {detail['by']}, from {detail['from']}"
        case EventType.OPENED:
            return f"by {detail['owner']}"
        case EventType.CLAIMED:
            return f"by {detail['owner']}" + (", forced" if detail["forced"] else "")
        case _:
            return ", ".join(f"{name} {value}" for name, value in detail.items() if value is not None)
