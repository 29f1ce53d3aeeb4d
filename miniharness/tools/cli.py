"""The commands that touch tools: call one, accept a changed one, try one out, and check what is declared."""

from __future__ import annotations

import getpass
import json
import shlex
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from miniharness import signals
from miniharness.cli import By, Json, RunId, Why, app, decide, headed, printed, said, state_folder, typed
from miniharness.contract import Budget
from miniharness.errors import ENDED_BADLY, Interrupted, UsageError
from miniharness.machine import Event, EventType, State
from miniharness.report import exit_code, next_command, report, summary
from miniharness.runs import Runs

if TYPE_CHECKING:
    from miniharness.tools.config import Config, LookUp, Tool

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
    within: Annotated[
        str | None, typer.Option(metavar="RUN", help="the agent's run that it belongs to: equal calls in it are one")
    ] = None,
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
    from miniharness.tools.names import operation
    from miniharness.tools.policy import Policy
    from miniharness.tools.remote import find

    settings, run = load(config), f"{within}.{run}" if within and run else run
    with closing(Runs(state_folder(ctx, new=True))) as journal:
        tool, arguments = _what(journal, run, tool, args)
        target = find(settings, tool)
        if run is None and target.declared.operation == "call":
            raise UsageError(f"each call of {tool} is an operation of its own; give it a name with --run ID")
        run_id = run or operation(tool, arguments, within)
        options = "" if config.resolve() == Path.cwd() else f" --config {shlex.quote(str(config))}"
        asked = calls.Asked(
            expect=_object("--expect", _text(expect)) if expect is not None else None,
            permit=execute,
            take_over=take_over,
            budget=Budget(dispatches=dispatches) if dispatches else None,
            deadline=deadline.timestamp() if deadline else None,
            within=within,
            command=f"python -m miniharness call{options}",
            accept=f"python -m miniharness --state-dir {shlex.quote(str(journal.folder))} accept{options}",
        )

        def once() -> Mapping[str, Any]:
            try:
                passage = calls.Passage(journal, Policy.of(settings), target, run_id, arguments, asked)
                return signals.run(signals.obeyed(calls.call(passage)))
            except Interrupted as stop:
                if journal.get(run_id) is None:
                    raise
                return report(journal, run_id, stop, permit=execute)

        result = once()
        if _asked_in_place(journal, result):
            result = once()
    reads = target.declared.recovery == "read"
    text = result["result"] if reads else summary(result, target.declared.resource)
    print(json.dumps(result, ensure_ascii=False) if as_json else text)
    raise typer.Exit(0 if reads else exit_code(result))


def _what(journal: Runs, run: str | None, tool: str | None, args: str | None) -> tuple[str, dict[str, Any]]:
    """The tool and its arguments; those of a run that was begun need not be said again."""
    stored = journal.get(run) if run else None
    if stored:
        tool, given = tool or stored.contract.tool.name, stored.contract.action
        if not stored.contract.command:
            raise UsageError(f"run {run} is a program's call of {tool}; run that program again to go on with it")
        return tool, given if args is None else _object("--args", args)
    if tool is None or args is None:
        begun = f"there is no run {run!a} yet; " if run else ""
        missing = "SERVER.TOOL" if tool is None else "--args; for no arguments: --args '{}'"
        raise UsageError(f"{begun}a new call needs {missing}")
    return tool, _object("--args", args)


def _asked_in_place(journal: Runs, result: Mapping[str, Any]) -> bool:
    """Ask the person at the terminal, if there is one and something waits for them; whether they said yes."""
    from miniharness.tools import approvals

    waits = result.get("next") and result["next"]["action"] == "approve"
    if not (waits and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    run = journal.require(result["run"])
    question, by = approvals.question(journal, run), getpass.getuser()
    if question is None or not approvals.may_answer(question, by):
        return False
    print(f"{question['why']}\n{question['shown']}", file=sys.stderr)
    try:
        if not typer.confirm("send exactly this, once?", err=True):
            return False
    except typer.Abort:
        return False
    approvals.approve(journal, run, by)
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
    from miniharness.tools.config import MANUAL, load
    from miniharness.tools.pins import Pins
    from miniharness.tools.remote import find

    target = replace(find(load(config), tool), declared=MANUAL)  # a look-up is accepted by its own name

    async def described() -> Mapping[str, Any]:
        async with target.reach() as reached:
            return reached.definition

    definition = signals.run(signals.obeyed(described()))
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
        waiting = [r for r in journal.all(State.WAITING_EXECUTION) if r.approval and r.approval["by"] is None]
        if not waiting:
            print("no call waits for an approval", file=sys.stderr)
        for run in waiting:
            question = approvals.question(journal, run) or {}
            following = next_command(run, journal.folder)
            if as_json:
                print(json.dumps({"run": run.id, **question, "next": following}, ensure_ascii=False))
            else:
                print(f"{run.id}: {question['why']}\n{question['shown']}\nnext: {following['command']}\n")


@app.command()
def approve(
    ctx: typer.Context,
    run: RunId,
    by: By,
    for_session: Annotated[
        bool, typer.Option("--for-session", help="and every such call of the tool within the same agent's run")
    ] = False,
    paths: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="with --for-session: only for files within these")
    ] = None,
) -> None:
    """Approve the write that a run asks for, exactly as it is shown, once."""
    from miniharness.tools import approvals

    said("--by", by)
    if paths and not for_session:
        raise UsageError("--paths limits --for-session; a single write is approved as it is shown")
    with closing(Runs(state_folder(ctx))) as journal:
        stored = journal.require(run)

        def following() -> str:
            return typed(next_command(stored, journal.folder))

        question = approvals.question(journal, stored)
        if question is None:
            raise UsageError(f"run {run} asks for no approval; next: {following()}")
        if stored.approval and stored.approval["by"] is not None:
            raise UsageError(f"run {run} is approved already, by {stored.approval['by']}; next: {following()}")
        if not approvals.may_answer(question, by):
            people = ", ".join(question["bound"]["answered_by"])
            raise UsageError(f"--by {by}: harness.toml lets only {people} approve (approvals.by)")
        trust = approvals.trust_in(journal, stored, paths or []) if for_session else None
        stored = approvals.approve(journal, stored, by, trust)
        print(question["shown"])
        print(f"{run}: approved by {by}, for this one write")
        if trust:
            print(_trusted(trust, by))
        print(f"next: {following()}")


def _trusted(trust: Mapping[str, Any], by: str) -> str:
    files = f" on files within {', '.join(trust['paths'])}" if trust["paths"] else ""
    limits = "what a rule denies stays denied, and a destructive tool or a shell is asked about each time"
    return f"{trust['within']}: {by} trusts calls of {trust['tool']}{files}; {limits}"


@app.command()
def trust(ctx: typer.Context, as_json: Json = False) -> None:
    """List what was approved for the whole of an agent's run."""
    with closing(Runs(state_folder(ctx))) as journal:
        listed = False
        for event in journal.recorded(EventType.APPROVED):
            if given := event.detail.get("trust"):
                by = event.detail["by"]
                print(json.dumps({**given, "by": by}, ensure_ascii=False) if as_json else _trusted(given, by))
                listed = True
        if not listed:
            print("nothing was approved for the whole of an agent's run", file=sys.stderr)


@app.command()
def deny(ctx: typer.Context, run: RunId, by: By, why: Why) -> None:
    """Say no to the write that a run asks for: it is cancelled, after a look at what is there."""
    event = Event(EventType.CANCEL_REQUESTED, {"by": said("--by", by), "why": said("--why", why)})
    with closing(Runs(state_folder(ctx))) as journal:
        decide(journal, run, event, while_driven=True, told=f"denied by {by}")


@app.command()
def probe(
    server: Annotated[str, typer.Argument(metavar="SERVER[.TOOL]")],
    args: Annotated[str | None, typer.Option(metavar="JSON", help="arguments that the tool takes")] = None,
    scratch: Annotated[
        bool, typer.Option("--scratch", help="the server works on a scratch copy: it may be written to and killed")
    ] = False,
    look_up: Annotated[
        str | None,
        typer.Option("--lookup", metavar="TABLE", help="where none is declared: look_up, as in harness.toml"),
    ] = None,
    key: Annotated[str | None, typer.Option(metavar="NAME", help="where none is declared: the key's argument")] = None,
    count: Annotated[
        str | None, typer.Option(metavar="TABLE", help="like --lookup; its `found` gives the number of effects")
    ] = None,
    vary: Annotated[
        str | None, typer.Option(metavar="NAME", help="the argument that may vary; default: the first text")
    ] = None,
    config: Folder = Path(),
    as_json: Json = False,
) -> None:
    """Grade how a tool's writes can be recovered, by trying it; with SERVER alone, list its tools."""
    from miniharness.tools import grades, results
    from miniharness.tools.bench import Bench
    from miniharness.tools.config import SERVERS, load
    from miniharness.tools.probe import probe as tried
    from miniharness.tools.remote import find

    settings = load(config)
    if "." not in server:
        _list_tools(settings, server, as_json)
        return
    found = find(settings, server)
    declared = found.declared
    if declared.recovery == "read":
        raise UsageError(f"{server} only reads (harness.toml); there is nothing to recover")
    if args is None:
        raise UsageError(f"{server} needs arguments to be tried with: --args '{{...}}'")
    if not scratch:
        raise UsageError(
            f"{server} would be written to, and its server killed and frozen; let {settings.folder / SERVERS} "
            "point at a scratch copy of its data (another folder: --config DIR), then add --scratch"
        )
    probed = _completed(server, declared, look_up=_table("--lookup", look_up), key=key)
    counting, arguments = _table("--count", count), _object("--args", args)

    async def try_it() -> list[grades.Experiment]:
        target, where = replace(found, declared=probed), settings.server(found.server)
        async with Bench(where, target, arguments, varied=vary, count=counting) as bench:
            return await tried(bench)

    experiments = signals.run(signals.obeyed(try_it()))
    told = results.masked(grades.graded(server, declared, probed, experiments), results.secrets())
    print(json.dumps(told, ensure_ascii=False) if as_json else _report(told))
    if told["contradictions"] or told["grade"] == grades.Grade.F:
        raise typer.Exit(ENDED_BADLY)


def _completed(name: str, declared: Tool, **given: Any) -> Tool:
    """The declaration with what the command gives where nothing is declared."""
    for field, value in given.items():
        if value is not None and getattr(declared, field):
            raise UsageError(f"harness.toml declares {field} of {name}; try another one there")
    return declared.model_copy(update={field: value for field, value in given.items() if value is not None})


def _table(option: str, text: str | None) -> LookUp | None:
    """A query as it stands in harness.toml behind `look_up =`."""
    import tomllib

    from pydantic import ValidationError

    from miniharness.tools.config import LookUp

    if text is None:
        return None
    try:
        return LookUp.model_validate(tomllib.loads(f"it = {text}")["it"])
    except tomllib.TOMLDecodeError as error:
        told = str(error)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
    raise UsageError(f'{option} must be a table like {{ tool = "list", found = "items | [0]" }}: {told}')


def _list_tools(settings: Config, server: str, as_json: bool) -> None:
    from miniharness.tools.bench import offered

    declared = settings.tools.get(server, {})
    table = headed("tool", "hints of the server", "declared", "look-up", "fences")
    tools = signals.run(signals.obeyed(offered(settings.server(server))))
    for name, hints in tools.items():
        tool = declared.get(name)
        if as_json:
            said = tool.model_dump(mode="json", exclude_defaults=True) if tool else None
            print(json.dumps({"tool": f"{server}.{name}", "hints": hints, "declared": said}, ensure_ascii=False))
            continue
        words = ", ".join(f"{hint}={json.dumps(value)}" for hint, value in hints.items()) or "none"
        told = (tool.recovery, tool.asked, "yes" if tool.fenced else "") if tool else ("no: manual", "", "")
        table.add_row(name, words, *told)
    if not as_json:
        printed(table)
    if missing := sorted(declared.keys() - tools.keys()):
        raise UsageError(f"harness.toml declares {', '.join(missing)}, which the server {server} does not offer")


def _report(told: Mapping[str, Any]) -> str:
    """The report of a probe for a person."""
    parts = [f"{told['tool']}: grade {told['grade']}\n  {told['means']}"]
    parts += [f"{e['name']}: {e['did']}\n  {e['saw']}\n  {e['verdict']}" for e in told["experiments"]]
    parts += [f"harness.toml: {said}" for said in (*told["contradictions"], *told["unproven"])]
    parts += [f"what fits, in harness.toml:\n\n{told['harness_toml']}"]
    return "\n\n".join(parts)


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
    from miniharness.tools.config import load
    from miniharness.tools.policy import Policy
    from miniharness.tools.remote import find
    from miniharness.tools.rules import UNNAMED

    settings = load(config)
    target, policy = find(settings, _dotted(tool)), Policy.of(settings)
    decision = policy.decide(target.call(_object("ARGS", args)), target.declared.danger)
    following = decision.following
    told: dict[str, str | None] = {"decision": decision.behavior.value, "reason": decision.reason}
    told |= {"next": f"{following.behavior} {following.text} ({following.source})" if following else None}
    if as_json:
        print(json.dumps(told, ensure_ascii=False))
        return
    print(f"{told['decision']}: {told['reason']}")
    if decision.rule:
        unnamed = UNNAMED[target.declared.danger][0]
        print(f"without it: {told['next'] or f'no other rule matches; then the answer is {unnamed}'}")
    for name in policy.unsupported:
        print(f"not applied: {name}", file=sys.stderr)


def _dotted(tool: str) -> str:
    """`SERVER.TOOL`, also for `mcp__SERVER__TOOL`."""
    parts = tool.split("__", 2)
    return f"{parts[1]}.{parts[2]}" if parts[0] == "mcp" and len(parts) == 3 else tool


@config_app.command()
def check(config: Folder = Path()) -> None:
    """Print what is declared of each tool, and what is missing or not applied; connects to nothing."""
    from miniharness.tools.config import load
    from miniharness.tools.policy import Policy

    settings = load(config)
    policy = Policy.of(settings)
    servers = headed("server", "where", "problem")
    tools = headed("tool", "recovery", "risk", "key", "look-up", "absent is final")
    for server in settings.servers.values():
        servers.add_row(server.name, server.url or " ".join(server.command), server.problem)
    for server_name, declared in sorted(settings.tools.items()):
        for name, tool in sorted(declared.items()):
            told = (tool.recovery, tool.danger, tool.key or "", tool.asked or "none", _final(tool))
            tools.add_row(f"{server_name}.{name}", *told)
    printed(servers)
    printed(tools)
    for name in policy.unsupported:
        print(f"not applied: {name}", file=sys.stderr)
    for problem in (problems := [*settings.problems, *policy.broken]):
        print(problem, file=sys.stderr)
    print("a tool that is not declared is manual: an unknown outcome of it needs a person")
    print("what the servers say of their tools: miniharness probe SERVER")
    if problems:
        raise typer.Exit(UsageError.exit_code)


def _final(tool: Tool) -> str:
    if tool.fenced:
        return "at once (fence)"
    if tool.recovery in ("read", "manual") or not tool.look_up:
        return ""
    if tool.deduplicates:
        return "no; it is sent again"
    return f"after {tool.settles_after:g} s" if tool.settles_after is not None else "never after an attempt"


@config_app.command()
def schema() -> None:
    """Print the JSON Schema of harness.toml."""
    from miniharness.tools.config import Harness

    print(json.dumps(Harness.model_json_schema(), indent=2))
