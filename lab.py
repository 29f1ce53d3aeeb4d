"""The ticket lab: create one review ticket, and still exactly one after any crash.

This file puts the parts together: the command line, the ticket tool and the contract. It decides nothing; what happens
next is the machine's business, what is true is the journal's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import miniharness
import model as model_side
from miniharness import faults, signals
from miniharness.contract import Budget, Contract, Tool, check_identifier
from miniharness.errors import INTERNAL, TRY_AGAIN, ContractMismatch, HarnessError, Interrupted, UsageError
from miniharness.machine import FINAL, Run, State
from miniharness.mcp.wire import TOKEN, Limits
from miniharness.models import anthropic, scripted
from miniharness.report import exit_code, nothing, report, summary
from miniharness.runs import Runs, refuse_other

if TYPE_CHECKING:
    import asyncio

    from miniharness.engine import Model
    from miniharness.mcp.declared import Declaration
    from miniharness.mcp.session import Session

RUN = "review-001"
GOAL = {"source": "source-001", "title": "核验 Agent Harness 资料"}
OWN_SERVER = "stdio"
TOOL = Tool(name="create_review_ticket", resource="ticket", server=OWN_SERVER, fences=True, deduplicates=True)
COMMAND = "python lab.py"
SERVER = Path(__file__).with_name("server.py")


def session_for(state_dir: Path, server: str = OWN_SERVER, fault: str | None = None) -> Session:
    """A session with the ticket server: our own child, which starts now, or the running one at the URL `server`.

    Raises:
        ToolUnavailable: the child cannot be started.
    """
    if server != OWN_SERVER:
        from miniharness.mcp.session import http_session

        return http_session(server, {"Authorization": f"Bearer {os.environ[TOKEN]}"}, Limits())
    from miniharness.mcp.child import Child

    env = {faults.ENVIRONMENT: fault} if fault == faults.SERVER_AFTER_COMMIT else {}
    child = Child([sys.executable, str(SERVER), "--db", str(state_dir / "tickets.sqlite")], env)
    from miniharness.mcp.session import stdio_session  # while the child is starting

    return stdio_session(child, Limits())


def contract_for(
    stored: Run | None,
    expected: Mapping[str, str] | None = None,
    *,
    provider: str | None = None,
    model: str | None = None,
    url: str | None = None,
    budget: Budget | None = None,
    deadline: float | None = None,
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
    if was is None and deadline is not None and deadline <= time.time():
        raise UsageError("--deadline is in the past; a new run could not do anything")
    return Contract(
        goal=goal,
        tool=replace(TOOL, server=_checked_server(url)) if url or was is None else was.tool,
        provider=provider,
        model=model or scripted.MODEL,
        budget=budget or (was.budget if was else Budget()),
        deadline=deadline if deadline is not None or was is None else was.deadline,
        command=COMMAND,
    )


def _checked_server(url: str | None) -> str:
    if url is None or url == OWN_SERVER:
        return OWN_SERVER
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--url {url!a} must begin with http:// or https:// and a host")
    if "@" in parts.netloc:
        raise UsageError(f"--url must not hold a password; put the server's bearer token into {TOKEN}")
    return url


def finished(runs: Runs, run: str, **asked: Any) -> dict[str, Any] | None:
    """The report of a run that has ended, without a model, a tool or an SDK; None when there is something to do.

    Raises:
        as `execute` does.
    """
    stored = runs.get(run)
    if stored is None or stored.state not in FINAL:
        return None
    refuse_other(stored, contract_for(stored, **asked))
    return report(runs, run)


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
    asked = {"provider": provider, "model": model, "url": url, "budget": budget, "deadline": deadline}
    with closing(Runs(state_dir)) as runs:
        return await _go_on(runs, run, execute_write, fault, take_over, expected=expected, **asked)


async def _go_on(
    runs: Runs, run: str, permit: bool, fault: str | None, take_over: bool, **asked: Any
) -> dict[str, Any]:
    stored = runs.get(run)
    contract = contract_for(stored, **asked)
    _check_secrets(contract, stored.state if stored else State.NEW)
    stopped = None
    try:
        opened = await runs.open(run, contract, take_over)
        if opened.state not in FINAL:
            await _drive(runs, opened, permit, fault)
    except (UsageError, ContractMismatch):
        raise
    except HarnessError as error:
        stopped = error
    return report(runs, run, stopped, permit=permit)


def _check_secrets(contract: Contract, state: State) -> None:
    """Ask for what a run in `state` will need from the environment, before anything is opened or debited."""
    if state is State.NEW and contract.provider == "anthropic":
        anthropic.require_key()
    if state not in FINAL and contract.tool.server != OWN_SERVER and not os.environ.get(TOKEN):
        raise UsageError(f"{contract.tool.server} needs the server's bearer token in the environment variable {TOKEN}")


async def _drive(runs: Runs, run: Run, permit: bool, fault: str | None) -> None:
    from miniharness.engine import Ports, drive

    async with session_for(runs.folder, run.contract.tool.server, fault) as session:
        from miniharness.mcp.declared import DeclaredTool  # while the child is starting

        tool = faults.FaultyTool(DeclaredTool(session, tools()), fault)
        await drive(runs, run, Ports(_model(run.contract), tool), permit)


def _model(contract: Contract) -> Model:
    return partial(model_side.ask, provider=contract.provider, model=contract.model)


def tools() -> Declaration:
    """The server's two tools as the operator declares them."""
    from miniharness.mcp.declared import keyed
    from store import Found

    return keyed(
        look_up="lookup_review_ticket",
        write=TOOL.name,
        noun=TOOL.resource,
        fields=frozenset(GOAL),
        answer=Found,
        clean=frozenset({"invalid", "conflict", "stale"}),
    )


# -- many at once -----------------------------------------------------------------------------------------------------


async def execute_many(
    state_dir: Path,
    goals: AsyncIterable[Mapping[str, Any] | str],
    *,
    execute_write: bool = False,
    url: str | None = None,
    concurrency: int = 32,
    servers: int = 1,
    stop: asyncio.Event | None = None,
    **asked: Any,
) -> AsyncIterator[dict[str, Any]]:
    """Take a run for each goal as far as it goes, `concurrency` at a time; yields reports in the order of completion.

    A goal is `{"run", "source", "title"}` or that as JSON text; its place in the order, from 1, is the report's `line`.
    A finished run is only read, another is taken further. One that cannot be used is reported under `interrupted`; the
    others go on. Our own server is replaced when it dies. `asked` is as for `execute`: provider, model, budget,
    deadline. Once `stop` is set, no goal is taken any more and the runs under way halt after their present step.

    Raises:
        PoolExhausted: the server died again and again.
        StoreError: the journal itself cannot be opened.
    """
    import asyncio

    from miniharness.batch import Batch
    from miniharness.mcp.pool import Pool

    server = _checked_server(url)

    def contract(stored: Run | None, goal: Mapping[str, Any]) -> Contract:
        made = contract_for(stored, goal, **asked, url=server)
        _check_secrets(made, stored.state if stored else State.NEW)
        return made

    with closing(Runs(state_dir)) as runs:
        async with Pool(lambda: session_for(runs.folder, server), tools(), servers) as pool:
            batch = Batch(runs, pool, _run_and_goal, contract, _model)
            async for result in batch.run(goals, concurrency, execute_write, stop or asyncio.Event()):
                yield result


def _run_and_goal(item: Mapping[str, Any] | str) -> tuple[str, dict[str, Any]]:
    """The run id and the goal of one line of a batch.

    Raises:
        UsageError: it has another form.
    """
    try:
        plain = json.loads(item) if isinstance(item, str) else item
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the line is not JSON: {error}") from None
    if not isinstance(plain, Mapping) or not isinstance(plain.get("run"), str):
        raise UsageError('the line must be an object like {"run": "r-1", "source": "s", "title": "t"}')
    goal = {field: value for field, value in plain.items() if field != "run"}
    return check_identifier(plain["run"]), model_side.validate_action(goal)


# -- the command line -------------------------------------------------------------------------------------------------


def _time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time like 2026-12-01T09:00 or 2026-12-01T09:00Z") from None


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def _folder(text: str) -> Path:
    return Path(_text(text))


def _count(text: str) -> int:
    if text.isascii() and text.isdecimal() and 1 <= int(text) <= 1000:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1000")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab.py", description="Create one review ticket, crash-recoverably.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--state-dir", type=_folder, required=True, metavar="DIR", help="where both databases live; made if missing")
    add("--run", metavar="ID", help=f"the run's name (default: {RUN})")
    add("--source", metavar="S", help=f"goal: the source (default for a new run: {GOAL['source']})")
    add("--title", metavar="T", help=f"goal: the title (default for a new run: {GOAL['title']})")
    add("--execute", action="store_true", help="the permit: this command may write")
    add("--provider", choices=model_side.PROVIDERS, help="who proposes (default for a new run: fixture)")
    add("--model", type=_text, metavar="NAME", help="the provider's model")
    add("--dispatches", type=_count, metavar="N", help="budget: at most N writes are sent (default: 3)")
    add("--model-requests", type=_count, metavar="N", help="budget: the model is asked at most N times (default: 5)")
    add("--deadline", type=_time, metavar="TIME", help="ISO 8601, local without a zone; nothing new begins after it")
    add("--transport", choices=("stdio", "http"), help="how to reach the ticket server (default for a new run: stdio)")
    add("--url", type=_text, metavar="URL", help=f"of a running HTTP server; its token is read from {TOKEN}")
    add("--fault", choices=faults.POINTS, help="die at this point, to see the recovery")
    add(
        "--batch",
        type=argparse.FileType(encoding="utf-8-sig", errors="surrogateescape"),
        metavar="FILE",
        help='many runs: a line {"run", "source", "title"} each; - is stdin',
    )
    add("--concurrency", type=_count, default=32, metavar="N", help="of a batch: runs at a time (default: %(default)s)")
    add("--servers", type=_count, default=1, metavar="N", help="of a batch: server processes (default: %(default)s)")
    add("--take-over", action="store_true", help="take the run from an owner that lives but is stuck")
    add("--json", action="store_true", help="print one JSON object")
    add("--version", action="version", version=f"Mini Harness {miniharness.__version__}")
    return parser


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `contract_for`."""
    if (args.transport == "http") != bool(args.url):
        raise UsageError("--transport http and --url URL belong together")
    if args.url and args.fault == faults.SERVER_AFTER_COMMIT:
        raise UsageError(f"--fault {args.fault} needs our own server, not --transport http")
    limits = {"dispatches": args.dispatches, "model_requests": args.model_requests}
    limits = {name: value for name, value in limits.items() if value is not None}
    goal = {"source": args.source, "title": args.title}
    return {
        "expected": {field: value for field, value in goal.items() if value is not None},
        "provider": args.provider,
        "model": args.model,
        "url": OWN_SERVER if args.transport == "stdio" else args.url,
        "budget": Budget(**limits) if limits else None,
        "deadline": args.deadline,
    }


def _result(args: argparse.Namespace) -> dict[str, Any]:
    """Do what the command asks; a finished run is only read, so that this takes no time."""
    asked, run = _asked(args), args.run or RUN
    with closing(Runs(args.state_dir)) as runs:
        if told := finished(runs, run, **asked):
            return told
        return signals.run(signals.obeyed(_go_on(runs, run, args.execute, args.fault, args.take_over, **asked)))


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    args = _parser().parse_args(argv)
    try:
        return signals.run(_batch(args)) if args.batch else _one(args)
    except HarnessError as error:  # of a batch
        print(f"lab.py: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # nobody reads on
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is left to flush goes there
        return TRY_AGAIN
    except Exception:
        import traceback

        traceback.print_exc()  # a bug of ours; what is on disk is as true as before
        return INTERNAL


def _one(args: argparse.Namespace) -> int:
    error: HarnessError | None = None
    try:
        result = _result(args)
    except HarnessError as stopped:
        error, result = stopped, _as_stored(args, stopped)
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
        with closing(Runs(args.state_dir)) as runs:
            return report(runs, args.run or RUN, error, permit=args.execute)
    except HarnessError:
        return nothing(args.run or RUN, "nothing could be read", error)


async def _batch(args: argparse.Namespace) -> int:
    import asyncio

    from miniharness.batch import lines, tell

    single = {"--run": args.run, "--source": args.source, "--title": args.title, "--fault": args.fault}
    if alone := [flag for flag, value in single.items() if value] + ["--take-over"] * args.take_over:
        raise UsageError(f"{alone[0]} is for one run; a batch takes its runs from its file")
    asked = {name: value for name, value in _asked(args).items() if name != "expected"}
    how = {"execute_write": args.execute, "concurrency": args.concurrency, "servers": args.servers}
    stop = asyncio.Event()
    received = signals.heard(stop.set)
    goals = lines(args.batch)
    code = await tell(execute_many(args.state_dir, goals, stop=stop, **how, **asked), args.batch, args.json)
    if received:
        print(f"interrupted by {received[0]}; the same command goes on from here", file=sys.stderr)
    return TRY_AGAIN if received else code


if __name__ == "__main__":
    signals.hold()  # until somebody listens, and for good when all is read and told
    code = main()
    sys.stdout.flush()
    os._exit(code)  # everything is on disk; the SDK's teardown would take longer than the run
