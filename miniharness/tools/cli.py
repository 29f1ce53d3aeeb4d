"""The commands that touch tools: call one, accept a changed one, and check what is declared."""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from miniharness import signals
from miniharness.cli import By, Json, RunId, Why, app, decide, headed, printed, said, state_folder
from miniharness.contract import Budget
from miniharness.errors import UsageError
from miniharness.machine import Event, EventType, State
from miniharness.report import exit_code, next_command, summary
from miniharness.runs import Runs

Folder = Annotated[Path, typer.Option("--config", metavar="DIR", help="where .mcp.json and harness.toml are")]
FullName = Annotated[str, typer.Argument(metavar="SERVER.TOOL")]

config_app = typer.Typer(no_args_is_help=True, help="What is declared of servers and tools.")
app.add_typer(config_app, name="config")


@app.command()
def call(
    ctx: typer.Context,
    tool: Annotated[str | None, typer.Argument(metavar="[SERVER.TOOL]")] = None,
    args: Annotated[str | None, typer.Option(metavar="JSON", help="the arguments, an object")] = None,
    run: Annotated[str | None, typer.Option(metavar="ID", help="default: made of the tool and the arguments")] = None,
    execute: Annotated[bool, typer.Option("--execute", help="the permit: this command may write")] = False,
    expect: Annotated[
        str | None, typer.Option(metavar="JSON|FILE", help="what the resource must have; default: the arguments")
    ] = None,
    dispatches: Annotated[int | None, typer.Option(min=1, max=1000, help="at most so many writes are sent")] = None,
    deadline: Annotated[datetime | None, typer.Option(help="nothing new begins after it")] = None,
    take_over: Annotated[bool, typer.Option("--take-over", help="take the run from an owner that is stuck")] = False,
    config: Folder = Path(),
    as_json: Json = False,
) -> None:
    """Call a tool once, durably: the same command again goes on, whatever happened to the one before."""
    from miniharness.tools import calls
    from miniharness.tools.config import load

    given = partial(
        calls.call,
        settings=load(config),
        full_name=tool,
        arguments=_object("--args", args) if args is not None else None,
        run=run,
        expect=_object("--expect", _text(expect)) if expect is not None else None,
        permit=execute,
        take_over=take_over,
        budget=Budget(dispatches=dispatches) if dispatches else None,
        deadline=deadline.timestamp() if deadline else None,
    )
    with closing(Runs(state_folder(ctx, new=True))) as journal:
        result = signals.run(signals.obeyed(given(journal)))
        if _asked_in_place(journal, result):
            result = signals.run(signals.obeyed(given(journal)))
        noun = "resource"
        if "run" in result and (stored := journal.get(result["run"])):
            noun = stored.contract.tool.resource
    if "run" not in result:  # a tool that only reads
        print(json.dumps(result, ensure_ascii=False) if as_json else result["result"])
        return
    print(json.dumps(result, ensure_ascii=False) if as_json else summary(result, noun))
    raise typer.Exit(exit_code(result))


def _asked_in_place(journal: Runs, result: Mapping[str, Any]) -> bool:
    """Ask the person at the terminal, if there is one and something waits for them; whether they said yes."""
    from miniharness.tools import approvals

    waits = result.get("next") and result["next"]["action"] == "approve"
    if not (waits and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    run = journal.require(result["run"])
    question = approvals.question(journal, run)
    if question is None:
        return False
    print(f"{question['why']}\n{question['shown']}", file=sys.stderr)
    if not typer.confirm("send exactly this, once?", err=True):
        return False
    approvals.approve(journal, run, getpass.getuser())
    return True


def _text(given: str) -> str:
    """The JSON itself, or the content of the file that is named."""
    if given.lstrip().startswith("{"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--expect {given!a} is neither a JSON object nor a readable file: {error}") from None


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option} is not JSON: {error}") from None
    if not isinstance(plain, dict):
        raise UsageError(f'{option} must be a JSON object like {{"title": "..."}}')
    return plain


@app.command()
def accept(ctx: typer.Context, tool: FullName, config: Folder = Path()) -> None:
    """Accept a tool as its server describes it now, and show what has changed."""
    from miniharness.tools import calls
    from miniharness.tools.config import load
    from miniharness.tools.pins import Pins

    target = calls.find(load(config), tool)
    definition = signals.run(signals.obeyed(calls.describe(target)))
    with closing(Pins(state_folder(ctx))) as pins:
        changed = pins.accept(target.full_name, definition)
    print(changed or f"{tool} is as it was accepted")
    print(f"{tool} is accepted as it is now")


@app.command(name="result")
def show_result(ctx: typer.Context, hash: Annotated[str, typer.Argument(metavar="HASH")]) -> None:  # noqa: A002
    """Print the whole of an answer that was cut."""
    from miniharness.tools import results

    print(results.kept(state_folder(ctx), hash))


@app.command(name="approvals")
def list_approvals(ctx: typer.Context, as_json: Json = False) -> None:
    """List the calls that wait for an approval, each with what would be sent."""
    from miniharness.tools import approvals

    with closing(Runs(state_folder(ctx))) as journal:
        asked = [(run, approvals.question(journal, run)) for run in journal.all(State.WAITING_EXECUTION)]
        for run, question in asked:
            if question is None or not run.approval or run.approval["by"] is not None:
                continue
            following = next_command(run, journal.folder)
            if as_json:
                print(json.dumps({"run": run.id, **question, "next": following}, ensure_ascii=False))
            else:
                print(f"{run.id}: {question['why']}\n{question['shown']}\nnext: {following['command']}\n")


@app.command()
def approve(ctx: typer.Context, run: RunId, by: By) -> None:
    """Approve the write that a run asks for, exactly as it is shown, once."""
    from miniharness.tools import approvals

    said("--by", by)
    with closing(Runs(state_folder(ctx))) as journal:
        stored = journal.require(run)
        question = approvals.question(journal, stored)
        if question is None:
            raise UsageError(f"run {run} asks for no approval; next: {next_command(stored, journal.folder)['command']}")
        stored = approvals.approve(journal, stored, by)
        print(question["shown"])
        print(f"{run}: approved by {by}, for this one write")
        print(f"next: {next_command(stored, journal.folder)['command']}")


@app.command()
def deny(ctx: typer.Context, run: RunId, by: By, why: Why) -> None:
    """Say no to the write that a run asks for: it is cancelled, after a look at what is there."""
    event = Event(EventType.CANCEL_REQUESTED, {"by": said("--by", by), "why": said("--why", why)})
    with closing(Runs(state_folder(ctx))) as journal:
        decide(journal, run, event, while_driven=True)


rules_app = typer.Typer(no_args_is_help=True, help="What may be called.")
app.add_typer(rules_app, name="rules")


@rules_app.command()
def explain(
    tool: FullName,
    args: Annotated[str, typer.Argument(metavar="JSON")] = "{}",
    config: Folder = Path(),
    as_json: Json = False,
) -> None:
    """Print what the rules say of a call, the rule that decides, and the one that would have decided without it."""
    from miniharness.tools import calls, hooks, rules
    from miniharness.tools.config import load

    settings = load(config)
    target, known = calls.find(settings, _dotted(tool)), rules.load(settings)
    reads = target.declared.recovery == "read"
    decision = known.decide(target.call(_object("ARGS", args)), reads=reads)
    following = decision.following
    told: dict[str, str | None] = {"decision": decision.behavior.value, "reason": decision.reason}
    told |= {"next": f"{following.behavior} {following.text} ({following.source})" if following else None}
    if as_json:
        print(json.dumps(told, ensure_ascii=False))
        return
    print(f"{told['decision']}: {told['reason']}")
    print(f"without it: {told['next'] or 'no other rule matches; what no rule names is asked about'}")
    for name in [*known.unsupported, *hooks.load(settings).unsupported]:
        print(f"not applied: {name}", file=sys.stderr)


def _dotted(tool: str) -> str:
    """`SERVER.TOOL`, also for `mcp__SERVER__TOOL`."""
    parts = tool.split("__", 2)
    return f"{parts[1]}.{parts[2]}" if parts[0] == "mcp" and len(parts) == 3 else tool


@config_app.command()
def check(config: Folder = Path()) -> None:
    """Print what is declared of each tool, and what is missing; connects to nothing."""
    from miniharness.tools.config import load

    settings = load(config)
    servers, tools = (
        headed("server", "where", "problem"),
        headed("tool", "recovery", "key", "look-up", "absent is final"),
    )
    for server in settings.servers.values():
        servers.add_row(server.name, server.url or " ".join(server.command), server.problem)
    for server_name, declared in sorted(settings.tools.items()):
        for name, tool in sorted(declared.items()):
            look_up = tool.look_up.tool if tool.look_up else "none"
            tools.add_row(f"{server_name}.{name}", tool.recovery, tool.key or "", look_up, _final(tool))
    printed(servers)
    printed(tools)
    problems = [f"mcpServers.{s.name}: {s.problem}" for s in settings.servers.values() if s.problem]
    problems += [f"tools.{name}: there is no such server" for name in settings.tools if name not in settings.servers]
    for problem in problems:
        print(problem, file=sys.stderr)
    print("a tool that is not declared is manual: an unknown outcome of it needs a person")
    if problems:
        raise typer.Exit(UsageError.exit_code)


def _final(tool: Any) -> str:
    if tool.recovery in ("read", "manual") or not tool.look_up:
        return ""
    if tool.fences:
        return "at once (fence)"
    return f"after {tool.settles_after:g} s" if tool.settles_after is not None else "never after an attempt"


@config_app.command()
def schema() -> None:
    """Print the JSON Schema of harness.toml."""
    from miniharness.tools.config import Harness

    print(json.dumps(Harness.model_json_schema(), indent=2))
