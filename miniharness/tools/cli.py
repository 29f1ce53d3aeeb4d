"""The commands that touch tools: call one, accept a changed one, and check what is declared."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from miniharness import signals
from miniharness.cli import Json, app, headed, printed, state_folder
from miniharness.contract import Budget
from miniharness.errors import UsageError
from miniharness.report import exit_code, summary
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

    settings = load(config)
    with closing(Runs(state_folder(ctx, new=True))) as journal:
        work = calls.call(
            journal,
            settings,
            tool,
            _object("--args", args) if args is not None else None,
            run=run,
            expect=_object("--expect", _text(expect)) if expect is not None else None,
            permit=execute,
            take_over=take_over,
            budget=Budget(dispatches=dispatches) if dispatches else None,
            deadline=deadline.timestamp() if deadline else None,
        )
        result = signals.run(signals.obeyed(work))
        noun = "resource"
        if "run" in result and (stored := journal.get(result["run"])):
            noun = stored.contract.tool.resource
    if "run" not in result:  # a tool that only reads
        print(json.dumps(result if as_json else result["result"], ensure_ascii=False, indent=None if as_json else 2))
        return
    print(json.dumps(result, ensure_ascii=False) if as_json else summary(result, noun))
    raise typer.Exit(exit_code(result))


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
