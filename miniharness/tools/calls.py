"""One call of any tool, from what is asked to what is told: the stages that every call goes through.

A write is a run of the machine, whatever the tool; one that only reads is asked straight away.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miniharness.contract import Budget, Contract, digest
from miniharness.engine import Json, Ports, drive
from miniharness.errors import (
    ApprovalNeeded,
    ContractMismatch,
    Denied,
    HarnessError,
    RunBusy,
    ToolUnavailable,
    UsageError,
)
from miniharness.machine import FINAL, Run, State
from miniharness.report import report
from miniharness.runs import Runs, refuse_other
from miniharness.tools import approvals, results
from miniharness.tools.hooks import Verdict
from miniharness.tools.limits import Counted
from miniharness.tools.pins import Pins
from miniharness.tools.policy import Policy
from miniharness.tools.rules import Behavior, Call, Decision
from miniharness.tools.target import Reached, Target

TRIES = 3  # to reach a tool that dies: the first, and two more


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What whoever asks for a call says of it, beside tool and arguments.

    `within` is the agent's run that it is counted for. `command` takes its own run further, `accept` accepts a changed
    tool.
    """

    expect: Json | None = None
    permit: bool = False
    take_over: bool = False
    budget: Budget | None = None
    deadline: float | None = None
    within: str | None = None
    command: str = ""
    accept: str = ""


@dataclass(slots=True)
class Passage:
    """A call on its way through the stages, each of which reads and sets what it is about."""

    runs: Runs
    policy: Policy
    target: Target
    run_id: str
    arguments: Json
    asked: Asked
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    tool: Reached | None = None
    decision: Decision | None = None
    answer: Any = None
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def reads(self) -> bool:
        """Whether the tool only reads."""
        return self.target.declared.recovery == "read"

    @property
    def seen(self) -> Call:
        """The call as rules and hooks see it."""
        return self.target.call(self.arguments)

    @property
    def reached(self) -> Reached:
        """The tool, which a stage before this one has reached."""
        assert self.tool
        return self.tool

    @property
    def contract(self) -> Contract:
        """What the run of this write is, or was, opened with."""
        stored, asked = self.runs.get(self.run_id), self.asked
        was = stored.contract if stored else None
        return self.target.contract(
            self.arguments,
            asked.expect or (was.goal if was else None),
            budget=asked.budget or (was.budget if was else None),
            deadline=asked.deadline if asked.deadline is not None or was is None else was.deadline,
            command=asked.command,
        )


Stage = Callable[[Passage], Awaitable[None]]
"""Does its part of a call; stops it by raising a `HarnessError` whose message whoever asked can act on."""


async def call(passage: Passage) -> Json:
    """Take one call as far as it goes and return its report; a stored run goes on as it was opened.

    Raises:
        UsageError, ContractMismatch: the call is wrong; nothing was changed.
        HarnessError: a tool that only reads could not be asked, or a rule or hook denies it.
    """
    runs, run_id = passage.runs, passage.run_id
    stored = None if passage.reads else runs.get(run_id)
    async with passage.stack:
        try:
            for stage in FINISHED if stored and stored.state in FINAL else STAGES:
                await stage(passage)
        except (UsageError, ContractMismatch):
            raise
        except HarnessError as stop:
            if passage.reads:
                raise
            passage.told = report(runs, run_id, stop, permit=passage.asked.permit)
            await mask(passage)
        return passage.told


async def find(passage: Passage) -> None:
    """Reach the tool, which must be as it was accepted."""
    passage.tool = await passage.stack.enter_async_context(passage.target.reach())
    if pinned := passage.tool.pinned:
        with closing(Pins(passage.runs.folder)) as pins:
            for name, definition in pinned.items():
                pins.check(name, definition, f"{passage.asked.accept} {name}")


async def validate(passage: Passage) -> None:
    """Check the arguments against the tool's schema."""
    key = passage.target.declared.key
    if key and key in passage.arguments:
        raise UsageError(f"the argument {key} carries the operation key, which is filled in by the engine")
    passage.reached.check(passage.arguments)


async def limit(passage: Passage) -> None:
    """Count the call, where it belongs to an agent's run."""
    if passage.asked.within:
        with closing(Counted(passage.runs.folder)) as counted:
            count = counted.read if passage.reads else counted.write
            count(passage.asked.within, passage.run_id, passage.policy.limits)


async def ask_hooks(passage: Passage) -> None:
    """Let the hooks look at the call; what they rewrite is checked like what was asked."""
    passage.policy, arguments = await passage.policy.before(passage.seen, passage.run_id)
    if arguments != passage.arguments:
        passage.arguments = arguments
        if passage.tool:
            await validate(passage)


async def rule(passage: Passage) -> None:
    """Let the rules decide. A write that may have been sent is looked up whatever they say by now."""
    decision = passage.policy.decide(passage.seen, passage.target.declared.danger)
    if passage.reads and decision.behavior is not Behavior.ALLOW:
        raise Denied(
            f"{passage.target.full_name}: {decision.reason}; a tool that only reads can be allowed, not approved"
        )
    if decision.behavior is Behavior.DENY and passage.runs.get(passage.run_id) is None:
        raise Denied(f"{passage.target.full_name}: {decision.reason}")
    passage.decision = decision


async def perform(passage: Passage) -> None:
    """Ask the tool, or take the write through the machine, alone if it has to be."""
    if not passage.target.declared.concurrent:
        await passage.stack.enter_async_context(_turn(passage.runs.folder, passage.target))
    await (_read(passage) if passage.reads else _write(passage))


@asynccontextmanager
async def _turn(folder: Path, target: Target) -> AsyncIterator[None]:
    from filelock import AsyncFileLock, Timeout  # its import tries out the disk

    (folder / "turns").mkdir(exist_ok=True)
    name = digest(target.full_name)  # which may hold what a file's name cannot
    lock = AsyncFileLock(folder / "turns" / name, timeout=target.declared.timeout)
    try:
        await lock.acquire()
    except Timeout:
        raise RunBusy(
            f"another call of {target.full_name} is under way, and it takes one at a time; try later"
        ) from None
    try:
        yield
    finally:
        await lock.release()


async def _read(passage: Passage) -> None:
    try:
        passage.answer = await passage.reached.read(passage.arguments)
    except ToolUnavailable as failed:
        reason = results.masked(str(failed), results.secrets())
        if passage.asked.within:
            with closing(Counted(passage.runs.folder)) as counted:
                counted.failed(passage.asked.within, passage.run_id)
        await passage.policy.after(passage.seen, passage.run_id, error=reason)
        raise ToolUnavailable(reason) from failed


async def _write(passage: Passage) -> None:
    """A server that dies is replaced, and then looked at first."""
    for left in reversed(range(TRIES)):
        try:
            stop = await _drive(passage, passage.contract)
            passage.told = report(passage.runs, passage.run_id, stop, permit=passage.asked.permit)
            return
        except ToolUnavailable:
            if not left or not await passage.reached.is_lost():
                raise
            await find(passage)


async def tell_hooks(passage: Passage) -> None:
    """Tell the hooks how it ended, once that is on disk."""
    if passage.reads:
        await passage.policy.after(passage.seen, passage.run_id, response=passage.answer)
    elif passage.told["state"] == State.SUCCEEDED:
        await passage.policy.after(
            passage.seen, passage.run_id, response=passage.told[passage.target.declared.resource]
        )
    elif passage.told["state"] in FINAL:
        await passage.policy.after(passage.seen, passage.run_id, error=passage.told["reason"])


async def mask(passage: Passage) -> None:
    """Hide what must not be shown of what came from the tool."""
    secrets = results.secrets()
    passage.answer = results.masked(passage.answer, secrets)
    for name in ("reason", passage.target.declared.resource, "events"):
        if name in passage.told:
            passage.told[name] = results.masked(passage.told[name], secrets)


async def cut(passage: Passage) -> None:
    """Cut what is too long for whoever asked, and keep the whole."""
    if passage.reads:
        answer, limit = passage.answer, passage.target.declared.result_limit
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, indent=2)
        passage.told = {"tool": passage.target.full_name, "result": results.cut(text, limit, passage.runs.folder)}


async def reread(passage: Passage) -> None:
    """Tell what became of a run that has ended."""
    refuse_other(passage.runs.require(passage.run_id), passage.contract)
    passage.told = report(passage.runs, passage.run_id)


STAGES: tuple[Stage, ...] = (find, validate, limit, ask_hooks, rule, perform, tell_hooks, mask, cut)
FINISHED: tuple[Stage, ...] = (ask_hooks, reread, mask)


async def _drive(passage: Passage, contract: Contract) -> HarnessError | None:
    """Take the run as far as permit, rules and approvals let it; returns why a permit was not enough."""
    runs, run_id, decision, asked = passage.runs, passage.run_id, passage.decision, passage.asked
    assert decision
    name = passage.target.full_name
    run = await runs.open(run_id, contract, asked.take_over)
    if run.state in FINAL:
        return None
    bound, shown = _binding(passage, run)
    if voided := approvals.void(runs, run, bound, time.time()):
        run = await runs.record(run, voided)
    tool = results.MaskedTool(passage.reached.port(contract.action, frozenset(contract.goal)), results.secrets())
    ports = Ports(_proposing(contract), tool)
    run = await drive(runs, run, ports, asked.permit and decision.behavior is Behavior.ALLOW)
    if run.state is not State.WAITING_EXECUTION:
        return None
    if decision.behavior is Behavior.DENY:
        return Denied(f"{name}: {decision.reason}")
    if not asked.permit and not voided:
        return None
    if run.approval is None:
        runs.request(run_id, approvals.ask(bound, shown, decision.reason, time.time()), while_driven=True)
        said, by = await _answered(passage, bound)
        if said.behavior == "deny":
            return Denied(f"{name}: {said.reason}")
        if said.behavior == "allow":
            approvals.approve(runs, runs.require(run_id), by)
            return await _drive(passage, contract)
    why = voided.detail["why"] if voided else decision.reason
    return ApprovalNeeded(f"{name} needs an approval: {why}")


async def _answered(passage: Passage, bound: Json) -> tuple[Verdict, str]:
    """What is answered to the question without asking a person now, and by whom."""
    if passage.target.declared.danger != "destructive":
        by = approvals.trusted(passage.runs, passage.run_id, bound, passage.seen, time.time())
        if by:
            return Verdict("allow"), f"{by}, for all such calls within this run"
    return await passage.policy.answer(passage.seen, passage.run_id), "a PermissionRequest hook"


def _binding(passage: Passage, run: Run) -> tuple[dict[str, Any], str]:
    """What an approval of the write is bound to, and what a person is shown."""
    target, contract, policy = passage.target, run.contract, passage.policy
    sent = passage.reached.sent(run.key, contract.action)
    shown = approvals.shown(target.full_name, target.identity, sent)
    return approvals.binding(run, sent, passage.reached.definition, policy.rules.digest, policy.people), shown


def _proposing(contract: Contract) -> Callable[[Json], Any]:
    async def propose(goal: Mapping[str, Any]) -> tuple[Json, Json]:
        return contract.action, {}

    return propose
