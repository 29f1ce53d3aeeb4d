"""The operator's command: look at runs, prove them, and decide what only a person may decide.

It reads and writes the journal alone and touches no tool and no model: what needs a look-up is told as the next
command.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import miniharness
from miniharness.contract import text_fault
from miniharness.database import inspect
from miniharness.errors import ENDED_BADLY, INTERNAL, NEEDS_A_PERSON, HarnessError, IllegalMove, UsageError
from miniharness.machine import FINAL, Event, EventType, State
from miniharness.report import next_command, report, summary
from miniharness.runs import Runs

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at runs, prove them, and decide what only a person may decide; call tools durably.",
)

RunId = Annotated[str, typer.Argument(metavar="RUN", help="the run's name")]
By = Annotated[str, typer.Option("--by", help="who decides")]
Why = Annotated[str, typer.Option("--why", help="the reason, for the history")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


PERSON = "needs a person"
CONCERNS = {
    "ask_operator": PERSON,
    "settle": PERSON,
    "approve": PERSON,
    "wait": "waits until nothing can land any more",
    "execute": "waits for a permit",
    "resume": "stopped early; nobody drives it",
}
"""What `doctor` says of a run that nobody drives, by its next action."""


class Verdict(StrEnum):
    """What a person may settle a run as."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"


def main() -> None:
    """Run the command; a `HarnessError` is one line on standard error and its exit code."""
    try:
        app(_folder_first(sys.argv[1:]))
    except HarnessError as error:
        print(f"miniharness: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception:
        traceback.print_exc()  # a bug of ours
        sys.exit(INTERNAL)


def _folder_first(argv: list[str]) -> list[str]:
    """The arguments with `--state-dir DIR` before the command, wherever it was typed."""
    for at, word in enumerate(argv):
        if word == "--state-dir":
            return argv[at : at + 2] + argv[:at] + argv[at + 2 :]
        if word.startswith("--state-dir="):
            return [word, *argv[:at], *argv[at + 1 :]]
    return argv


def _version(asked: bool) -> None:
    if asked:
        print(f"Mini Harness {miniharness.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    state_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="the state folder")] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="and stop")] = False,
) -> None:
    ctx.obj = state_dir


def state_folder(ctx: typer.Context, *, new: bool = False) -> Path:
    """The state folder; one that holds no journal is accepted only for a `new` one."""
    folder: Path | None = ctx.obj
    if folder is None:
        raise UsageError("--state-dir DIR is missing")
    if not new and not (folder / "runs.sqlite").exists():
        raise UsageError(f"--state-dir {folder} holds no runs.sqlite; give the folder that a run was made in")
    return folder


@contextmanager
def _journal(ctx: typer.Context) -> Iterator[Runs]:
    runs = Runs(state_folder(ctx))
    try:
        yield runs
    finally:
        runs.close()


def headed(*columns: str) -> Table:
    """An empty table with these columns."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def printed(table: Table) -> None:
    """Print the table."""
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)  # in a pipe nothing is folded


@app.command()
def runs(
    ctx: typer.Context,
    state: Annotated[State | None, typer.Option(help="only runs in this state")] = None,
    as_json: Json = False,
) -> None:
    """List the runs, each with its next command; --json prints one object a line."""
    table = headed("run", "state", "attempts", "reason", "next")
    with _journal(ctx) as journal:
        for run in journal.all(state):
            following = next_command(run, journal.folder, busy=journal.driven_elsewhere(run))
            spent = f"{run.dispatches_spent} of {run.dispatches_limit}"
            if as_json:
                told = {"run": run.id, "state": run.state, "reason": run.reason, "attempts": run.dispatches_spent}
                print(json.dumps(told | {"next": following}, ensure_ascii=False))
            else:
                table.add_row(run.id, run.state, spent, run.reason, typed(following))
    if not as_json:
        printed(table)


@app.command()
def show(ctx: typer.Context, run: RunId, as_json: Json = False) -> None:
    """Show one run: its state, what is certainly true, and its whole history."""
    with _journal(ctx) as journal:
        told, noun = report(journal, run), journal.require(run).contract.tool.resource
    print(json.dumps(told, ensure_ascii=False) if as_json else summary(told, noun))


@app.command()
def replay(
    ctx: typer.Context, run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="default: all")] = None
) -> None:
    """Fold the history again, compare it with the row, and check the hash chain."""
    broken = False
    with _journal(ctx) as journal:
        for stored in [journal.require(run)] if run else journal.all():
            faults = journal.replay(stored.id)
            broken |= bool(faults)
            for fault in faults:
                print(f"{stored.id}: {fault}")
            if stored.pruned:
                print(f"{stored.id}: its history was pruned; left are {stored.state} and head {stored.head}")
            elif not faults:
                whole = f"{stored.version} events, the chain is whole, and they give the stored row"
                print(f"{stored.id}: {whole}: {stored.state}, head {stored.head}")
    if broken:
        print("next: keep the file as it is, and restore a backup")
        raise typer.Exit(ENDED_BADLY)


@app.command()
def cancel(ctx: typer.Context, run: RunId) -> None:
    """Ask for a run to be cancelled; it looks up first, and a resource that is there still gives a verdict."""
    with _journal(ctx) as journal:
        decide(journal, run, Event(EventType.CANCEL_REQUESTED), while_driven=True)


@app.command()
def grant(
    ctx: typer.Context, run: RunId, dispatches: Annotated[int, typer.Option(min=1, max=1000)], by: By, why: Why
) -> None:
    """Allow more dispatches than the contract did; the run looks up before it uses one."""
    event = Event(EventType.GRANTED, {"dispatches": dispatches, "by": said("--by", by), "why": said("--why", why)})
    with _journal(ctx) as journal:
        decide(journal, run, event, while_driven=True)


@app.command()
def settle(ctx: typer.Context, run: RunId, verdict: Annotated[Verdict, typer.Option("--as")], by: By, why: Why) -> None:
    """End a run in reconcile_required by your word, after you looked for yourself; it is marked so for ever."""
    detail = {"as": str(verdict), "by": said("--by", by), "why": said("--why", why)}
    with _journal(ctx) as journal:
        decide(journal, run, Event(EventType.SETTLED, detail), while_driven=False)


def said(option: str, text: str) -> str:
    """What a person said, if it is acceptable text."""
    if fault := text_fault(text):
        raise UsageError(f"{option} {fault}")
    return text


def decide(journal: Runs, run_id: str, event: Event, *, while_driven: bool, told: str = "") -> None:
    """Record a person's decision and tell what is now to be done; `told` says it in their words."""
    try:
        run = journal.request(run_id, event, while_driven=while_driven)
    except IllegalMove as error:
        following = next_command(journal.require(run_id), journal.folder)
        raise IllegalMove(f"{error}; next: {following['command']}") from error
    print(
        f"{run.id}: {told or f'{event.type} is recorded'}; state {run.state}"
        + (f" ({run.reason})" if run.reason else "")
    )
    print(f"next: {typed(next_command(run, journal.folder, busy=journal.driven_elsewhere(run)))}")


def typed(following: Mapping[str, str]) -> str:
    """What to type next; where a person has to look first, one line for each that they may find."""
    if "or" in following:
        return f"if it is there: {following['or']}\nif not: {following['command']}"
    return following["command"]


@app.command()
def doctor(ctx: typer.Context) -> None:
    """Check every database in the folder, and list the runs that stopped early or need a person."""
    damaged = _examine(state_folder(ctx))
    if damaged:
        print("next: keep the damaged files as they are, and restore a backup")
        raise typer.Exit(ENDED_BADLY)
    table = headed("run", "state", "what", "reason", "next")
    waiting = False
    with _journal(ctx) as journal:
        for run in journal.all():
            if run.state in FINAL or journal.driven_elsewhere(run):
                continue
            following = next_command(run, journal.folder)
            table.add_row(run.id, run.state, CONCERNS[following["action"]], run.reason, typed(following))
            waiting |= CONCERNS[following["action"]] == PERSON
    if table.row_count:
        printed(table)
    else:
        print("every run has ended or is being driven; nothing to do. To prove their histories: replay")
    if waiting:
        raise typer.Exit(NEEDS_A_PERSON)


def _examine(folder: Path) -> bool:
    table, damaged = headed("file", "schema", "integrity"), False
    for path in sorted(folder.glob("*.sqlite")):
        version, integrity = inspect(path)
        damaged |= integrity != "ok"
        table.add_row(path.name, str(version), integrity)
    printed(table)
    return damaged


UNITS_S = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@app.command()
def prune(ctx: typer.Context, older_than: Annotated[str, typer.Option(metavar="AGE", help="like 30d, 12h")]) -> None:
    """Remove the history of runs that ended that long ago; their verdict and the chain's head stay.

    One that a person settled while its write may still land keeps its history.
    """
    number, unit = older_than[:-1], older_than[-1:]
    if unit not in UNITS_S or not number.isascii() or not number.isdecimal() or len(number) > 6:
        raise UsageError(f"--older-than {older_than!a} must be a number of up to 6 digits and d, h, m or s, like 30d")
    with _journal(ctx) as journal:
        pruned = journal.prune(time.time() - int(number) * UNITS_S[unit])
    print(f"{pruned} runs were pruned; `runs` still lists them with their verdict")


@app.command()
def demo() -> None:
    """Kill a server after its commit, once under a retry loop and once under Mini Harness, and compare the rows."""
    from miniharness.demo import main as run_demo

    raise typer.Exit(run_demo())
