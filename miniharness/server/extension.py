"""The extension of docs/recoverable-tools.md for servers on the MCP SDK: keys, epochs, outcomes and clean errors."""

from __future__ import annotations

import inspect
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from mcp import MCPError
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding, ToolBinding
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.utilities.func_metadata import FuncMetadata, func_metadata
from mcp.types import INTERNAL_ERROR, CallToolRequestParams, CallToolResult, RequestParams, TextContent
from pydantic import AfterValidator, Field, ValidationError

from miniharness.contract import text_fault
from miniharness.errors import HarnessError, StoreError, UsageError
from miniharness.mcp.wire import EPOCH_META, KEY_META, OUTCOME_METHOD, RECOVERABLE, REPLAYED_META, VERSION
from miniharness.server.outcomes import Operation, Outcomes, Refused

Request = ServerRequestContext[Any, Any]
Effect = TypeVar("Effect", bound=Callable[..., Any])

LARGEST_EPOCH = (1 << 63) - 1
CODES = {UsageError: "invalid", StoreError: "store"}


def _key(text: str) -> str:
    if fault := text_fault(text):
        raise ValueError(fault)
    return text


class OutcomeParams(RequestParams):
    """The parameters of the outcome method."""

    key: Annotated[str, AfterValidator(_key)]
    epoch: Annotated[int, Field(strict=True, ge=0, le=LARGEST_EPOCH)] | None = None


LookUp = Callable[[str, int | None], Awaitable[Mapping[str, Any] | None]]
"""What was done under a key, `{"tool", "arguments", "result"}`, or None; an epoch raises the key's fence."""


class OutcomeMethod(Extension):
    """The outcome method alone, for a server that keeps keys and fences by itself and answers by `look_up`."""

    identifier = RECOVERABLE

    def __init__(self, look_up: LookUp) -> None:
        self._look_up = look_up

    def settings(self) -> dict[str, Any]:
        """What the server says of the extension."""
        return {"version": VERSION}

    def methods(self) -> Sequence[MethodBinding]:
        """The one method."""
        return [MethodBinding(OUTCOME_METHOD, OutcomeParams, self._answer)]

    async def _answer(self, request: Request, params: OutcomeParams) -> HandlerResult:
        try:
            return {"outcome": await self._look_up(params.key, params.epoch)}
        except Exception as error:  # a database that is held or full; nothing is known then
            raise MCPError(INTERNAL_ERROR, f"the outcome cannot be told now: {type(error).__name__}") from error


@dataclass(frozen=True, slots=True)
class _Tool:
    binding: ToolBinding
    arguments: FuncMetadata


class Recoverable(OutcomeMethod):
    """Tools whose effects are in the author's own database, each done once for its operation key.

    `connect` is as `Outcomes` takes it. Declare the tools first, then give it to the server:
    `MCPServer(..., extensions=[recoverable])`.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.outcomes = Outcomes(connect)
        self._tools: dict[str, _Tool] = {}
        super().__init__(self._in_a_thread)

    async def _in_a_thread(self, key: str, epoch: int | None) -> Mapping[str, Any] | None:
        done = await anyio.to_thread.run_sync(self.outcomes.look_up, key, epoch)
        return {"tool": done.tool, "arguments": done.arguments, "result": done.result} if done else None

    def tool(self, *, key: str | None = None, **options: Any) -> Callable[[Effect], Effect]:
        """Declare a tool: a plain function of the connection and the tool's arguments, with its result's type.

        Its effect is what it does on that connection; it runs in a thread, within a transaction that it cannot end.
        `key` names the argument that carries the operation key, where it does not travel in `_meta`; `options` are
        those of `MCPServer.tool`.

        Raises:
            TypeError: the function is async, takes no connection, has no result type, or has no argument `key`.
        """

        def declare(effect: Effect) -> Effect:
            name = options.get("name") or effect.__name__
            self._tools[name] = self._declared(effect, name, key, dict(options))
            return effect

        return declare

    def _declared(self, effect: Callable[..., Any], name: str, key: str | None, options: dict[str, Any]) -> _Tool:
        signature = inspect.signature(effect, eval_str=True)
        connection, *parameters = signature.parameters.values() or (None,)
        if connection is None or inspect.iscoroutinefunction(effect):
            raise TypeError(f"{name} must be a plain function whose first parameter is the connection")
        if key and key not in signature.parameters:
            raise TypeError(f"{name} has no argument {key} for the operation key")
        told = func_metadata(effect, skip_names=[connection.name])
        if told.output_schema is None:
            raise TypeError(f"{name} must say the type of its result, which is kept as JSON")

        def run(mcp_context: Context, **arguments: Any) -> CallToolResult:
            def perform(database: Any) -> Any:
                result: Any = told.convert_result(effect(database, **arguments))
                if result.is_error:
                    raise Refused("; ".join(getattr(block, "text", "") for block in result.content))
                return result.structured_content

            try:
                outcome = self.outcomes.once(operation(mcp_context.request_context, key), perform)
            except (Refused, UsageError) as error:
                return failure(error)
            except Exception as error:  # the author's, or the database's: when its commit failed, nobody knows
                return failure(HarnessError(f"{type(error).__name__}: {error}"))
            return answer(outcome.result, replayed=outcome.replayed)

        context = inspect.Parameter("mcp_context", inspect.Parameter.KEYWORD_ONLY, annotation=Context)
        returns = Annotated[CallToolResult, signature.return_annotation]
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*parameters, context], return_annotation=returns
        )
        run.__annotations__ = {p.name: p.annotation for p in (*parameters, context)} | {"return": returns}
        run.__name__, run.__doc__ = name, effect.__doc__
        meta = options.pop("meta", None) or {}
        return _Tool(ToolBinding(run, meta | marker(key), options), told)

    def tools(self) -> Sequence[ToolBinding]:
        """The declared tools."""
        return [tool.binding for tool in self._tools.values()]

    async def intercept_tool_call(
        self, params: CallToolRequestParams, ctx: Request, call_next: CallNext
    ) -> HandlerResult:
        """Refuse arguments that do not fit as `invalid`, where the SDK would say so in words only or drop them."""
        if tool := self._tools.get(params.name):
            given = params.arguments or {}
            known = {field.alias or name for name, field in tool.arguments.arg_model.model_fields.items()}
            if unknown := sorted(given.keys() - known):
                return failure(UsageError(f"there is no argument {', '.join(unknown)}"))
            try:
                tool.arguments.validate_arguments(given)
            except ValidationError as error:
                faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
                return failure(UsageError("; ".join(faults)))
        return await call_next(ctx)


def marker(key: str | None = None) -> dict[str, Any]:
    """The `_meta` of a tool that keeps the contract; `key` is the argument with the operation key, if it is one."""
    return {RECOVERABLE: {"version": VERSION} | ({"key": key} if key else {})}


def operation(request: Request, key: str | None = None) -> Operation:
    """What a call of a tool asks for. Without any key it is an operation of its own, which nobody can look up.

    Raises:
        UsageError: key or epoch is not what it must be, or the argument `key` and `_meta` name two keys.
    """
    params: Mapping[str, Any] = request.params or {}
    arguments, meta = dict(params.get("arguments") or {}), request.meta or {}
    sent: Any = meta.get(KEY_META)
    epoch: Any = meta.get(EPOCH_META)
    named = arguments.pop(key) if key in arguments else sent
    if sent is not None and named != sent:
        raise UsageError(f"{key} and _meta {KEY_META} name two operations")
    if epoch is not None and (type(epoch) is not int or not 0 <= epoch <= LARGEST_EPOCH):
        raise UsageError(f"_meta {EPOCH_META} must be an integer from 0")
    if named is None and epoch is not None:
        raise UsageError(f"_meta {EPOCH_META} needs {KEY_META} beside it")
    if named is not None and (fault := text_fault(named)):
        raise UsageError(f"{key or f'_meta {KEY_META}'} {fault}")
    return Operation(named or uuid.uuid4().hex, params["name"], arguments, epoch)


def answer(content: Mapping[str, Any], *, replayed: bool = False) -> CallToolResult:
    """A good answer: the content as structure and as text, and whether it was given before."""
    text = TextContent(type="text", text=json.dumps(content, ensure_ascii=False))
    meta = {REPLAYED_META: True} if replayed else None
    return CallToolResult(content=[text], structured_content=dict(content), _meta=meta)


def failure(error: HarnessError, beside: Mapping[str, Any] = MappingProxyType({})) -> CallToolResult:
    """An error with its code. `invalid`, `conflict`, `stale` and `refused` mean that certainly nothing happened.

    Any other code, such as `store`, means that nobody knows. `beside` are fields that the tool's schema asks for: some
    clients check errors, too.
    """
    code = error.code if isinstance(error, Refused) else CODES.get(type(error), "unknown")
    content = {**beside, "error": {"code": code, "message": str(error)}}
    text = TextContent(type="text", text=json.dumps(content, ensure_ascii=False))
    return CallToolResult(content=[text], structured_content=content, is_error=True)
