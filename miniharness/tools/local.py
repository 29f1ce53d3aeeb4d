"""Functions of this process as tools: the same stages, machine and promise, with no agent and no server.

@tool(recovery="keyed", lookup=find_refund)
def refund(order_id: str, amount: int, *, key: str) -> None: ...

async with Ledger(Path("state")) as ledger:
    result = await ledger.call(refund, order_id="A-17", amount=500)
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from functools import update_wrapper
from pathlib import Path
from typing import Any, Final, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import to_jsonable_python

from miniharness.engine import Answer, Json, in_a_thread
from miniharness.errors import CannotTell, ToolUnavailable, UsageError
from miniharness.machine import Outcome
from miniharness.runs import Runs
from miniharness.tools import calls, config, results
from miniharness.tools.hooks import Hook
from miniharness.tools.names import operation
from miniharness.tools.policy import Policy
from miniharness.tools.target import Target

SERVER = "local"  # in rules a function is mcp__local__NAME


class NotFound(Enum):
    """What a look-up says when it has no resource to show."""

    ABSENT = "it is not there"
    UNKNOWN = "nobody can tell now"


ABSENT: Final = NotFound.ABSENT
UNKNOWN: Final = NotFound.UNKNOWN


class Refused(Exception):
    """A tool raises it when certainly nothing has happened. After any other exception the outcome is unknown."""


class LocalTool:
    """A function with what is declared of it; calling it runs the function itself, with no promise."""

    def __init__(self, function: Callable[..., Any], look_up: Callable[..., Any] | None, declared: config.Tool) -> None:
        self.function = function
        self.look_up = look_up
        self.declared = declared
        self.arguments = _model(function, declared.key)
        update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        return self.function(*args, **kwargs)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def target(self) -> Target:
        """The function as the target of a call."""
        identity = f"{self.function.__module__}.{self.function.__qualname__}"
        return Target(SERVER, self.name, self.declared, identity, self._reached)

    @asynccontextmanager
    async def _reached(self) -> AsyncIterator[FunctionReached]:
        yield FunctionReached(self)

    def plain(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as JSON, defaults filled in.

        Raises:
            UsageError: they do not fit the function's annotations; names each.
        """
        try:
            return self.arguments.model_validate(dict(given)).model_dump(mode="json")
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
            raise UsageError(f"the arguments do not fit {self.name}: {faults}") from None


def tool(
    *,
    recovery: Literal["read", "idempotent", "keyed", "lookup", "manual"],
    lookup: Callable[..., Any] | None = None,
    key: str | None = None,
    **declared: Any,
) -> Callable[[Callable[..., Any]], LocalTool]:
    """Make a function, plain or async, a tool. Its annotations are the schema of its arguments.

    Args:
        recovery: what is known of it, as in `harness.toml`.
        lookup: a function that is given those of `key` and the arguments that it has parameters for, and returns the
            resource as an object, `ABSENT` or `UNKNOWN`. The resource's fields are compared with the goal.
        key: the parameter that takes the operation key; hidden from whoever calls. Default for `keyed`: `key`.
        declared: further fields as in `harness.toml`: `expect`, `settles_after`, `timeout`, `paths`, ...

    Raises:
        UsageError: the declaration or the function's signature cannot be used.
    """
    fields: dict[str, Any] = {"recovery": recovery, "key": key or ("key" if recovery == "keyed" else None)}
    if lookup is not None:
        fields["look_up"] = config.LookUp(tool=lookup.__name__)
    try:
        made = config.Tool(**fields, **declared)
    except ValidationError as error:
        raise UsageError(f"@tool: {error.errors()[0]['msg']}") from None
    if made.outcome:
        raise UsageError("@tool: outcome is for tools of a server; a function is looked up by its lookup")
    return lambda function: LocalTool(function, lookup, made)


def _model(function: Callable[..., Any], key: str | None) -> type[BaseModel]:
    """The arguments of a function as a model, without the one that takes the key."""
    hints, parameters = get_type_hints(function, include_extras=True), inspect.signature(function).parameters
    if key and key not in parameters:
        raise UsageError(f"{function.__name__} has no parameter {key!a} for the operation key")
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or name not in hints:
            raise UsageError(f"{function.__name__}: the parameter {name} must be named and have an annotation")
        if name != key:
            fields[name] = (hints[name], ... if parameter.default is parameter.empty else parameter.default)
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)


@dataclass(frozen=True, slots=True)
class FunctionReached:
    """A function that can be called now."""

    tool: LocalTool

    @property
    def definition(self) -> Json:
        """The function's name, description and schema."""
        described = {"name": self.tool.name, "description": inspect.getdoc(self.tool.function) or ""}
        return described | {"inputSchema": self.tool.arguments.model_json_schema()}

    @property
    def pinned(self) -> dict[str, Json]:
        """Nothing: who changes the function is the operator."""
        return {}

    def check(self, arguments: Json) -> None:
        """Check the arguments against the annotations.

        Raises:
            UsageError: they do not fit.
        """
        self.tool.plain(arguments)

    def sent(self, key: str, arguments: Json) -> Json:
        """The arguments as the function gets them."""
        return {**arguments, self.tool.declared.key: key} if self.tool.declared.key else arguments

    def port(self, action: Json, compared: frozenset[str]) -> FunctionPort:
        """The function for the engine."""
        return FunctionPort(self, action, compared)

    async def read(self, arguments: Json) -> Any:
        """Call a function that only reads.

        Raises:
            ToolUnavailable: it raised, or took too long.
        """
        try:
            return to_jsonable_python(await self.run(self.tool.function, "", arguments))
        except Exception as error:
            raise ToolUnavailable(f"{self.tool.name}: {_reason(error)}") from error

    async def is_lost(self) -> bool:
        """It ends with us."""
        return False

    async def run(self, function: Callable[..., Any], key: str, arguments: Json) -> Any:
        """Call the tool's function, or its look-up, with what it has parameters for."""
        made = self.tool.arguments.model_validate(dict(arguments))
        known = {name: getattr(made, name) for name in type(made).model_fields}
        known[self.tool.declared.key or "key"] = key
        wanted = {name: known[name] for name in inspect.signature(function).parameters if name in known}
        limit_s = self.tool.declared.timeout
        try:
            async with asyncio.timeout(limit_s):
                if inspect.iscoroutinefunction(function):
                    return await function(**wanted)
                return await in_a_thread(lambda: function(**wanted))
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"no answer within {limit_s:g} s") from error


@dataclass(frozen=True, slots=True)
class FunctionPort:
    """The tool port of the engine over a function and its look-up."""

    reached: FunctionReached
    action: Json
    compared: frozenset[str]

    async def connect(self) -> Json:
        """Nothing has to be reached."""
        return {"function": self.reached.tool.target.identity}

    async def look_up(self, key: str, epoch: int) -> Json | None:
        """What the look-up function says.

        Raises:
            CannotTell: there is none.
            ToolUnavailable: it says `UNKNOWN`, raised, took too long or returned something else.
        """
        look_up = self.reached.tool.look_up
        if look_up is None:
            raise CannotTell
        name = look_up.__name__
        try:
            found = await self.reached.run(look_up, key, self.action)
        except Exception as error:
            raise ToolUnavailable(f"{name}: {_reason(error)}; nothing was decided") from error
        if found is ABSENT:
            return None
        if found is UNKNOWN:
            raise ToolUnavailable(f"{name}: {UNKNOWN.value}; nothing was decided")
        fields = to_jsonable_python(found)
        if not isinstance(fields, dict):
            raise ToolUnavailable(f"{name} must return an object, ABSENT or UNKNOWN, not {type(found).__name__}")
        return {"id": fields.get("id"), "action": {field: fields[field] for field in fields.keys() & self.compared}}

    async def dispatch(self, key: str, action: Json, epoch: int) -> Answer:
        """Call the function, once; whatever comes back, only a look-up will tell."""
        try:
            await self.reached.run(self.reached.tool.function, key, action)
        except Refused as refused:
            return Answer(Outcome.REFUSED, _reason(refused))
        except Exception as error:  # whatever it was: the effect may be there
            return Answer(Outcome.UNKNOWN, _reason(error))
        return Answer(Outcome.RETURNED)


def _reason(error: Exception) -> str:
    told = str(results.masked(str(error), results.secrets()))[:500]
    return told if isinstance(error, Refused | TimeoutError) else f"{type(error).__name__}: {told}"


class Ledger:
    """Durable calls of functions, over the journal in `folder`.

    Args:
        folder: the state folder; the same one goes on where it stopped.
        within: the run of the agent or job that makes the calls; equal calls within it are one operation, and so are
            equal calls without it. The n-th call of a tool with `operation = "call"` is always the same operation.
        rules: the folder of the rules and hooks that the calls are under. Without one the program's own word is
            enough: calling is the permit.
        hooks: functions that see each call before and after it, beside those of `rules`.

    Raises:
        StoreError, UsageError: from any method, when the folder cannot be used.
    """

    def __init__(
        self, folder: Path, *, within: str | None = None, rules: Path | None = None, hooks: Sequence[Hook] = ()
    ) -> None:
        self._runs = Runs(folder)
        self._within = within
        self._policy = (Policy.of(config.load(rules)) if rules else Policy.of_the_program()).also(hooks)
        self._counted = 0

    async def __aenter__(self) -> Ledger:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close, and tell the hooks that the run makes no more calls."""
        if self._within:
            await self._policy.stop(self._within)
        self.close()

    def close(self) -> None:
        """Close the journal."""
        self._runs.close()

    async def call(self, function: LocalTool, /, **arguments: Any) -> Json:
        """Call a function durably and return the report; the same call again goes on, whatever happened to this one.

        Raises:
            UsageError: the arguments do not fit.
            ContractMismatch: the operation stands for another call; nothing was changed.
            HarnessError: a function that only reads gave no answer, or a rule or hook denies it.
        """
        given = function.plain(arguments)
        run_id, asked = self._operation(function, given), calls.Asked(permit=True, within=self._within)
        return await calls.call(calls.Passage(self._runs, self._policy, function.target, run_id, given, asked))

    def _operation(self, function: LocalTool, arguments: Json) -> str:
        if function.declared.operation == "arguments":
            return operation(function.target.full_name, arguments, self._within)
        if self._within is None:
            raise UsageError(
                f"each call of {function.name} is an operation of its own; open the Ledger with within=RUN"
            )
        self._counted += 1
        return f"{self._within}.{self._counted}"
