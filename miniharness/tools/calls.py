"""One durable call of any MCP tool: find it, check its arguments, and take it through the machine.

Puts configuration, session and engine together as an application does; a tool declared as `read` goes straight.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jmespath
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from miniharness.contract import Budget, Contract, Tool, canonical, digest
from miniharness.engine import Json, Ports, drive
from miniharness.errors import ApprovalNeeded, ContractMismatch, Denied, HarnessError, ToolUnavailable, UsageError
from miniharness.machine import FINAL, Run, State
from miniharness.mcp.child import Child
from miniharness.mcp.declared import Declaration, DeclaredTool, Query
from miniharness.mcp.session import CallFailed, Session, http_session, stdio_session
from miniharness.mcp.wire import Limits
from miniharness.report import report
from miniharness.runs import Runs, refuse_other
from miniharness.tools import approvals, config, results
from miniharness.tools.pins import Pins
from miniharness.tools.policy import Policy
from miniharness.tools.rules import Behavior, Call

if TYPE_CHECKING:
    from mcp.types import CallToolResult

SERVERS_FOR_A_CALL = 3  # one, and two that replace it when it dies
OPERATOR = "operator"  # who proposes: the person or program that typed the arguments


@dataclass(frozen=True, slots=True)
class Target:
    """A tool of a configured server, and what is declared of it."""

    server: config.Server
    name: str
    declared: config.Tool

    @property
    def full_name(self) -> str:
        """`SERVER.TOOL`."""
        return f"{self.server.name}.{self.name}"

    def call(self, arguments: Mapping[str, Any]) -> Call:
        """The call as the rules look at it."""
        name = f"mcp__{self.server.name}__{self.name}"
        if self.declared.shell and self.declared.shell in arguments:
            return Call.of_shell(name, str(arguments[self.declared.shell]), arguments)
        paths = (
            (access, arguments[argument]) for argument, access in self.declared.paths.items() if argument in arguments
        )
        return Call(name, arguments, tuple((a, str(path)) for a, path in paths))

    def contract(
        self,
        arguments: Mapping[str, Any],
        expect: Mapping[str, Any] | None,
        *,
        budget: Budget | None,
        deadline: float | None,
        command: str,
    ) -> Contract:
        """The contract of a call with these arguments."""
        goal = expect or _filled(self.declared.expect, lambda name: _argument(arguments, name)) or arguments
        return Contract(
            goal=dict(goal),
            arguments=dict(arguments),
            tool=Tool(
                name=self.full_name,
                resource=self.declared.resource,
                server=self.server.identity,
                fences=self.declared.fences,
                deduplicates=self.declared.deduplicates,
                settles_after_s=self.declared.settles_after,
            ),
            provider=OPERATOR,
            model="none",
            budget=budget or Budget(),
            deadline=deadline,
            command=command,
        )


def find(settings: config.Config, full_name: str) -> Target:
    """The tool that `SERVER.TOOL` names.

    Raises:
        UsageError: the name or the server cannot be used.
    """
    server, dot, name = full_name.partition(".")
    if not (server and dot and name):
        raise UsageError(f"{full_name!a} must be SERVER.TOOL, with a server of {settings.folder / config.SERVERS}")
    return Target(settings.server(server), name, settings.tool(server, name))


def default_run(full_name: str | None, arguments: Mapping[str, Any] | None) -> str:
    """The run of a call that names none: equal arguments are one operation.

    Raises:
        UsageError: there is nothing to make a name of.
    """
    if full_name is None or arguments is None:
        raise UsageError("a call needs SERVER.TOOL and --args '{...}', or --run ID of one that was begun")
    return f"call-{digest(canonical([full_name, arguments]))[:12]}"


async def call(
    runs: Runs,
    settings: config.Config,
    full_name: str | None,
    arguments: Mapping[str, Any] | None,
    *,
    run: str | None = None,
    expect: Mapping[str, Any] | None = None,
    permit: bool = False,
    take_over: bool = False,
    budget: Budget | None = None,
    deadline: float | None = None,
) -> dict[str, Any]:
    """Take one call as far as it goes and return its report; a tool that only reads is asked at once.

    A stored run goes on with what it was opened with; whatever is given must agree with that.

    Raises:
        UsageError, ContractMismatch: the call is wrong; nothing was changed.
        StoreError: the journal cannot be used.
    """
    run_id = run or default_run(full_name, arguments)
    stored = runs.get(run_id)
    if stored is None and (full_name is None or arguments is None):
        raise UsageError(f"there is no run {run!a} yet; a new call needs SERVER.TOOL and --args")
    was = stored.contract if stored else None
    policy = Policy.of(settings)
    target = find(settings, full_name or (was.tool.name if was else ""))
    arguments = arguments if arguments is not None else (was.action if was else {})
    if target.declared.key and target.declared.key in arguments:
        raise UsageError(f"--args: {target.declared.key} carries the operation key, which is filled in by the engine")
    policy, arguments = await policy.before(target.call(arguments), run_id)
    if target.declared.recovery == "read":
        return await _read(runs.folder, target, arguments, policy)
    contract = target.contract(
        arguments,
        expect or (was.goal if was else None),
        budget=budget or (was.budget if was else None),
        deadline=deadline if deadline is not None or was is None else was.deadline,
        command=_command(settings.folder),
    )
    return await _write(runs, run_id, target, contract, policy, permit=permit, take_over=take_over)


def _command(folder: Path) -> str:
    config_option = "" if folder.resolve() == Path.cwd() else f" --config {shlex.quote(str(folder))}"
    return f"python -m miniharness call{config_option}"


async def _write(
    runs: Runs, run_id: str, target: Target, contract: Contract, policy: Policy, *, permit: bool, take_over: bool
) -> dict[str, Any]:
    stored = runs.get(run_id)
    if stored and stored.state in FINAL:
        refuse_other(stored, contract)
        return report(runs, run_id)
    stopped: HarnessError | None = None
    try:
        for servers in range(1, SERVERS_FOR_A_CALL + 1):
            async with session_for(target.server, target.declared.timeout) as session:
                try:
                    declared = await prepare(runs.folder, session, target, contract)
                    stopped = await _drive(
                        runs, run_id, Prepared(target, contract, session, declared, policy), permit, take_over
                    )
                    break
                except ToolUnavailable:  # where our own server died, the run goes on with the next: it looks up first
                    if servers == SERVERS_FOR_A_CALL or not session.connected or not await session.dies():
                        raise
    except (UsageError, ContractMismatch):
        raise
    except HarnessError as error:
        stopped = error
    told = report(runs, run_id, stopped, permit=permit)
    if told["state"] in FINAL:  # on disk
        succeeded = told["state"] == State.SUCCEEDED
        after = {"response": told[target.declared.resource]} if succeeded else {"error": told["reason"]}
        await policy.after(target.call(contract.action), run_id, **after)
    return told


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call whose tool is there, as it was accepted, and takes its arguments."""

    target: Target
    contract: Contract
    session: Session
    declared: Declaration
    policy: Policy

    def binding(self, run: Run) -> tuple[dict[str, Any], str]:
        """What an approval of the write is bound to, and what a person is shown."""
        sent = self.declared.arguments(run.key, self.contract.action)
        described = definition(self.session, self.target.name)
        shown = approvals.shown(self.target.full_name, self.target.server.identity, sent)
        return approvals.binding(run, sent, described, self.policy.rules.digest), shown


async def _drive(runs: Runs, run_id: str, call: Prepared, permit: bool, take_over: bool) -> HarnessError | None:
    """Let the rules decide, then take the run as far as it goes; returns why a permit was not enough.

    A write that was sent is looked up whatever the rules say by now.
    """
    seen = call.target.call(call.contract.action)
    decision = call.policy.decide(seen)
    if decision.behavior is Behavior.DENY and runs.get(run_id) is None:
        raise Denied(f"{call.target.full_name}: {decision.reason}")
    run = await runs.open(run_id, call.contract, take_over)
    if run.state in FINAL:
        return None
    bound, shown = call.binding(run)
    if voided := approvals.void(runs, run, bound, time.time()):
        run = await runs.record(run, voided)
    ports = Ports(_proposing(call.contract), DeclaredTool(call.session, call.declared))
    run = await drive(runs, run, ports, permit and decision.behavior is Behavior.ALLOW)
    if run.state is not State.WAITING_EXECUTION:
        return None
    if decision.behavior is Behavior.DENY:
        return Denied(f"{call.target.full_name}: {decision.reason}")
    if not permit and not voided:
        return None
    if run.approval is None:
        runs.request(run_id, approvals.ask(bound, shown, decision.reason, time.time()), while_driven=True)
        said = await call.policy.answer(seen, run_id)
        if said.behavior == "deny":
            return Denied(f"{call.target.full_name}: {said.reason}")
        if said.behavior == "allow":
            approvals.approve(runs, runs.require(run_id), "a PermissionRequest hook")
            return await _drive(runs, run_id, call, permit, take_over)
    why = voided.detail["why"] if voided else decision.reason
    return ApprovalNeeded(f"{call.target.full_name} needs an approval: {why}")


def _proposing(contract: Contract) -> Callable[[Json], Any]:
    async def propose(goal: Json) -> tuple[Json, Json]:
        return contract.action, {}

    return propose


async def _read(folder: Path, target: Target, arguments: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    seen = target.call(arguments)
    decision = policy.decide(seen, reads=True)
    if decision.behavior is not Behavior.ALLOW:
        raise Denied(f"{target.full_name}: {decision.reason}; a tool that only reads can be allowed, not approved")
    async with session_for(target.server, target.declared.timeout) as session:
        contract = target.contract(arguments, None, budget=None, deadline=None, command="")
        declared = await prepare(folder, session, target, contract)
        try:
            result = await session.call(
                target.name, declared.arguments("", arguments), _whole(session, target.name), {}
            )
        except CallFailed as error:
            await policy.after(seen, "", error=error.reason)
            raise ToolUnavailable(f"{target.full_name}: {error.reason}") from error
    await policy.after(seen, "", response=result)
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, indent=2)
    hidden = results.masked(text, results.secrets())
    return {"tool": target.full_name, "result": results.cut(hidden, target.declared.result_limit, folder)}


def session_for(server: config.Server, timeout_s: float) -> Session:
    """A session with that server; our own starts now."""
    limits = Limits(read_s=timeout_s)
    if server.url:
        return http_session(server.url, server.headers, limits)
    return stdio_session(Child(server.command, server.env), limits, "legacy")  # some hang on a newer greeting


async def prepare(folder: Path, session: Session, target: Target, contract: Contract) -> Declaration:
    """Connect, and check that the tools are there as they were accepted and take these arguments.

    Raises:
        ToolUnavailable: they are not there, or have changed.
        UsageError: the arguments break the tool's schema.
    """
    declared = target.declared
    names = [target.name] + ([declared.look_up.tool] if declared.look_up else [])
    await session.connect({})
    if missing := [name for name in names if name not in session.tools]:
        known = ", ".join(sorted(session.tools)) or "none"
        raise UsageError(f"the server {target.server.name} offers no tool {missing[0]}; it offers: {known}")
    accept = f"python -m miniharness --state-dir {shlex.quote(str(folder))} accept"
    with closing(Pins(folder)) as pins:
        for name in names:
            full = f"{target.server.name}.{name}"
            pins.check(full, definition(session, name), f"{accept} {full}")
    schema = session.tool(target.name).input_schema
    if declared.key and declared.key not in schema.get("properties", {}):
        raise ToolUnavailable(f"{target.full_name} has no argument {declared.key!a} for the operation key")
    if unknown := config.references([declared.model_dump()]) - schema.get("properties", {}).keys():
        raise UsageError(f"harness.toml: $args.{min(unknown)} is no argument of {target.full_name}")
    made = declaration(target, contract, _whole(session, target.name))
    _check_arguments(schema, made.arguments("key", contract.action), target.full_name)
    return made


async def describe(target: Target) -> dict[str, Any]:
    """What the server says of the tool now.

    Raises:
        ToolUnavailable: it cannot be asked.
    """
    async with session_for(target.server, target.declared.timeout) as session:
        await session.connect({target.name: frozenset()})
        return definition(session, target.name)


def definition(session: Session, name: str) -> dict[str, Any]:
    """What of a tool a person accepts: everything that it says of itself."""
    return session.tool(name).model_dump(mode="json", by_alias=True, exclude_none=True)


def _check_arguments(schema: Mapping[str, Any], arguments: Json, name: str) -> None:
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ToolUnavailable(f"{name} is set aside: its input schema is broken: {error.message[:200]}") from error
    known = schema.get("properties", {}).keys()
    if "additionalProperties" not in schema and (unknown := sorted(arguments.keys() - known)):  # it would be dropped
        raise UsageError(f"{name} has no argument {', '.join(unknown)}; it has: {', '.join(sorted(known)) or 'none'}")
    if faults := sorted(Draft202012Validator(schema).iter_errors(arguments), key=lambda e: e.json_path):
        told = "; ".join(f"{fault.json_path}: {fault.message[:200]}" for fault in faults[:5])
        raise UsageError(f"--args do not fit {name}: {told}")


def declaration(target: Target, contract: Contract, whole: Callable[[CallToolResult], Any]) -> Declaration:
    """The declared tool for the engine, for the one run of `contract`."""
    declared, action = target.declared, contract.action

    def arguments(key: str, given: Json) -> Json:
        return {**given, declared.key: key} if declared.key else given

    return Declaration(
        tool=target.name,
        arguments=arguments,
        look_up=_query(declared.look_up, action, frozenset(contract.goal)) if declared.look_up else None,
        needs={},
        clean=lambda error: any(_is_clean(known, error) for known in declared.clean_errors),
        read=whole,
        fences=declared.fences,
    )


def _query(look_up: config.LookUp, action: Json, compared: frozenset[str]) -> Query:
    def arguments(key: str) -> Json:
        filled: Json = _filled(look_up.arguments, lambda name: key if name == "key" else _argument(action, name))
        return filled

    leading = config.leading_field(look_up.found)

    def read(key: str, result: CallToolResult) -> Json | None:
        content = _content(result, look_up.reads)
        if leading and not (isinstance(content, dict) and leading in content):  # a typo must not look like an absence
            raise ValueError(f"it has no field {leading!a}, which `found` begins with")

        def search(expression: str, value: Any) -> Any:
            known = config.with_literals(expression, lambda name: key if name == "key" else _argument(action, name))
            return jmespath.search(known, value)

        found = search(look_up.found, content)
        if found in (None, False, "", [], {}):  # what JMESPath itself holds for false
            return None
        fields = search(look_up.fields, found)
        if not isinstance(fields, dict):
            raise ValueError("the look-up's fields are no object")
        named = search(look_up.id, found) if isinstance(found, dict) else None
        return {"id": named, "action": {field: fields[field] for field in fields.keys() & compared}}

    return Query(look_up.tool, arguments, read)


def _argument(arguments: Json, name: str) -> Any:
    return arguments.get(name.removeprefix("args."))


def _filled(value: Any, fill: Callable[[str], Any]) -> Any:
    """`value` with `$key` and `$args.NAME` filled in; a text that is nothing else becomes the very value."""
    if isinstance(value, str):
        if whole := config.REFERENCE.fullmatch(value):
            return fill(whole[1])
        return config.REFERENCE.sub(lambda m: str(fill(m[1])), value)
    if isinstance(value, list):
        return [_filled(item, fill) for item in value]
    return {k: _filled(item, fill) for k, item in value.items()} if isinstance(value, dict) else value


def _content(result: CallToolResult, reads: str) -> Any:
    if reads == "structured":
        if result.structured_content is None:
            raise ValueError('it has no structured content; set reads = "json" or "text"')
        return result.structured_content
    text = "".join(getattr(block, "text", "") for block in result.content)
    return json.loads(text) if reads == "json" else text


def _whole(session: Session, name: str) -> Callable[[CallToolResult], Any]:
    """Reads an answer of that tool; one that breaks the tool's own output schema is not whole."""
    schema = session.tool(name).output_schema
    validator = Draft202012Validator(schema) if schema else None

    def read(result: CallToolResult) -> Any:
        if validator and not validator.is_valid(result.structured_content):
            raise ValueError("the structured content breaks the tool's output schema")
        content = result.structured_content
        return content if content is not None else _content(result, "text")

    return read


def _is_clean(known: str | config.CleanError, error: Json) -> bool:
    code, message = error.get("code"), error.get("message")
    if isinstance(known, str) or known.code:
        return code == (known if isinstance(known, str) else known.code)
    return isinstance(message, str) and bool(re.search(known.message or "", message))
