"""The ticket lab: create one review ticket, and still exactly one after any crash.

This file puts the parts together: the command line, the ticket tool and the contract. It decides nothing; what happens
next is the machine's business, what is true is the journal's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import miniharness
import model as model_side
from miniharness import faults
from miniharness.contract import Budget, Contract, Tool
from miniharness.engine import Ports, drive
from miniharness.errors import INTERNAL, ContractMismatch, HarnessError, Interrupted, UsageError
from miniharness.machine import FINAL, Run, State
from miniharness.mcp.child import Child
from miniharness.mcp.keyed import KeyedTool, Pair
from miniharness.mcp.session import Session, http_session, stdio_session
from miniharness.mcp.wire import TOKEN, Limits
from miniharness.models import anthropic, scripted
from miniharness.report import exit_code, nothing, report, summary
from store import Found, Runs

RUN = "review-001"
GOAL = {"source": "source-001", "title": "核验 Agent Harness 资料"}
TOOL = Tool(name="create_review_ticket", resource="ticket", fences=True, deduplicates=True)
COMMAND = "python lab.py"
SERVER = Path(__file__).with_name("server.py")

TOOLS = Pair(
    look_up="lookup_review_ticket",
    write=TOOL.name,
    noun=TOOL.resource,
    fields=frozenset(GOAL),
    answer=Found,
    clean=frozenset({"invalid", "conflict", "stale"}),
)


def session_for(state_dir: Path, url: str | None = None, fault: str | None = None) -> Session:
    """A session with the ticket server: our own child, which starts now, or the running one at `url`.

    Raises:
        ToolUnavailable: the child cannot be started.
    """
    if url:
        return http_session(url, os.environ[TOKEN], Limits())
    env = {faults.ENVIRONMENT: fault} if fault == faults.SERVER_AFTER_COMMIT else {}
    child = Child([sys.executable, str(SERVER), "--db", str(state_dir / "tickets.sqlite")], env)
    return stdio_session(child, Limits())


def contract_for(
    stored: Run | None,
    expected: Mapping[str, str] | None,
    *,
    provider: str | None,
    model: str | None,
    budget: Budget | None,
    deadline: float | None,
) -> Contract:
    """The contract that is asked for; what is not said is as the stored run has it, or the default for a new one.

    Raises:
        UsageError: names the field and the rule it breaks.
    """
    was = stored.contract if stored else None
    goal = model_side.validate_action({**(was.goal if was else GOAL), **(expected or {})})
    provider = provider or (was.provider if was else "fixture")
    if provider not in model_side.PROVIDERS:
        raise UsageError(f"--provider {provider!r} is not known; choose one of {', '.join(model_side.PROVIDERS)}")
    if not model and was and was.provider == provider:
        model = was.model
    elif not model and provider == "anthropic":
        raise UsageError("--provider anthropic needs --model NAME")
    return Contract(
        goal=dict(goal),
        tool=TOOL,
        provider=provider,
        model=model or scripted.MODEL,
        budget=budget or (was.budget if was else Budget()),
        deadline=deadline if deadline is not None or was is None else was.deadline,
        command=COMMAND,
    )


async def execute(
    state_dir: Path,
    *,
    run: str = RUN,
    expected: Mapping[str, str] | None = None,
    provider: str | None = None,
    model: str | None = None,
    execute_write: bool = False,
    url: str | None = None,
    fault: str | None = None,
    take_over: bool = False,
    budget: Budget | None = None,
    deadline: float | None = None,
) -> dict[str, Any]:
    """Take the run as far as it goes and return its report: the JSON object of `lab.py --json`.

    Opens the run or continues the stored one; a finished run is only read. `execute_write` is the permit. `deadline`
    is in seconds since 1970. A run that stopped early is reported under `interrupted`, not raised.

    Raises:
        UsageError, ContractMismatch: the call is wrong; nothing was changed.
        StoreError: the journal itself cannot be opened or read.
    """
    runs = Runs(state_dir)
    try:
        stored = runs.get(run)
        contract = contract_for(stored, expected, provider=provider, model=model, budget=budget, deadline=deadline)
        _check_secrets(contract, stored.state if stored else State.NEW, url)
        stopped = None
        try:
            opened = runs.open(run, contract, take_over)
            if opened.state not in FINAL:
                await _drive(runs, opened, execute_write, url, fault)
        except (UsageError, ContractMismatch):
            raise
        except HarnessError as error:
            stopped = error
        return report(runs, run, stopped, permit=execute_write, flags=_flags(url))
    finally:
        runs.close()


def _check_secrets(contract: Contract, state: State, url: str | None) -> None:
    """Ask for what a run in `state` will need from the environment, before anything is opened or debited."""
    if state is State.NEW and contract.provider == "anthropic":
        anthropic.require_key()
    if state not in FINAL and url and not os.environ.get(TOKEN):
        raise UsageError(f"--url needs the server's bearer token in the environment variable {TOKEN}")


async def _drive(runs: Runs, run: Run, permit: bool, url: str | None, fault: str | None) -> None:
    async with session_for(runs.folder, url, fault) as session:
        propose = partial(model_side.propose, provider=run.contract.provider, model=run.contract.model)
        await drive(runs, run, Ports(propose, faults.FaultyTool(KeyedTool(session, TOOLS), fault)), permit)


def _flags(url: str | None) -> str:
    return f" --transport http --url {shlex.quote(url)}" if url else ""


# -- the command line -------------------------------------------------------------------------------------------------


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time like 2026-12-01T09:00 or 2026-12-01T09:00Z") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lab.py", description="Create one review ticket, crash-recoverably.")
    add = parser.add_argument
    add("--state-dir", type=Path, required=True, metavar="DIR", help="where both databases live; made if missing")
    add("--run", default=RUN, metavar="ID", help="the run's name (default: %(default)s)")
    add("--source", metavar="S", help=f"goal: the source (default for a new run: {GOAL['source']})")
    add("--title", metavar="T", help=f"goal: the title (default for a new run: {GOAL['title']})")
    add("--execute", action="store_true", help="the permit: this command may write")
    add("--provider", choices=model_side.PROVIDERS, help="who proposes (default for a new run: fixture)")
    add("--model", metavar="NAME", help="the provider's model")
    add("--dispatches", type=int, metavar="N", help="budget: at most N writes are sent (default: 3)")
    add("--model-requests", type=int, metavar="N", help="budget: the model is asked at most N times (default: 5)")
    add("--deadline", type=_time, metavar="TIME", help="ISO 8601; nothing new begins after it")
    add("--transport", choices=("stdio", "http"), default="stdio", help="how to reach the ticket server")
    add("--url", metavar="URL", help=f"of a running HTTP server; its token is read from {TOKEN}")
    add("--fault", choices=faults.POINTS, help="die at this point, to see the recovery")
    add("--take-over", action="store_true", help="take the run from an owner that lives but is stuck")
    add("--json", action="store_true", help="print one JSON object")
    add("--version", action="version", version=f"Mini Harness {miniharness.__version__}")
    return parser


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `execute`."""
    if (args.transport == "http") != bool(args.url):
        raise UsageError("--transport http and --url URL belong together")
    if args.url and args.fault == faults.SERVER_AFTER_COMMIT:
        raise UsageError(f"--fault {args.fault} needs our own server; leave out --transport http")
    named = {"dispatches": args.dispatches, "model_requests": args.model_requests}
    limits = {name: value for name, value in named.items() if value is not None}
    if bad := [name for name, value in limits.items() if not 1 <= value <= 1000]:
        raise UsageError(f"--{bad[0].replace('_', '-')} must be from 1 to 1000")
    goal = {"source": args.source, "title": args.title}
    return {
        "run": args.run,
        "expected": {field: value for field, value in goal.items() if value is not None},
        "provider": args.provider,
        "model": args.model,
        "execute_write": args.execute,
        "url": args.url,
        "fault": args.fault,
        "take_over": args.take_over,
        "budget": Budget(**limits) if limits else None,
        "deadline": args.deadline.timestamp() if args.deadline else None,
    }


async def _until_signalled(work: Any) -> dict[str, Any]:
    """Await `work`; the first SIGINT or SIGTERM cancels it, a second one ends the process at once."""
    task = asyncio.ensure_future(work)
    received: list[str] = []

    def stop(number: signal.Signals) -> None:
        if received:
            os._exit(Interrupted.exit_code)
        received.append(number.name)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        result: dict[str, Any] = await task
        return result
    except asyncio.CancelledError:
        raise Interrupted(f"interrupted by {received[0]}") from None


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    logging.basicConfig(handlers=[logging.NullHandler()])  # what matters of the SDK's log is in our errors
    args = _parser().parse_args(argv)
    error: HarnessError | None = None
    try:
        result = asyncio.run(_until_signalled(execute(args.state_dir, **_arguments(args))))
    except HarnessError as stopped:
        error, result = stopped, _as_stored(args, stopped)
    except Exception:
        traceback.print_exc()  # a bug of ours; what is on disk is as true as before
        return INTERNAL
    if error and result["interrupted"]:
        print(f"lab.py: {error}", file=sys.stderr)
    if args.json:
        print(json.dumps(result, ensure_ascii=False))
    elif error is None or isinstance(error, Interrupted):
        print(summary(result, TOOL.resource))
    return exit_code(result)


def _as_stored(args: argparse.Namespace, error: HarnessError) -> dict[str, Any]:
    """The report of a run that the command could not take further."""
    try:
        runs = Runs(args.state_dir)
        try:
            return report(runs, args.run, error, permit=args.execute, flags=_flags(args.url))
        finally:
            runs.close()
    except HarnessError:
        return nothing(args.run, "the journal cannot be read", {"error": type(error).__name__, "message": str(error)})


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # everything is on disk; the SDK's teardown would take longer than the run
