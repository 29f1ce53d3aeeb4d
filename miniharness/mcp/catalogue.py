"""A catalogue of tools in which one broken entry does not lose the others, as it does in the SDK's own reading."""

from __future__ import annotations

from typing import Any

from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCResponse, Tool, methods
from pydantic import ValidationError

BROKEN_META = "io.github.miniharness/broken"
"""In the `_meta` of an entry that stands for a broken one: what is wrong with it."""


def mended(item: SessionMessage | Exception) -> SessionMessage | Exception:
    """The same message; where it is a list of tools, what the SDK would refuse is replaced by an empty entry."""
    message = getattr(item, "message", None)
    if isinstance(message, JSONRPCResponse) and isinstance(tools := message.result.get("tools"), list):
        message.result["tools"] = [_entry(tool, message.result) for tool in tools]
    return item


def _entry(tool: Any, result: dict[str, Any]) -> Any:
    version = "2026-07-28" if "resultType" in result else "2025-11-25"
    try:
        methods.validate_server_result("tools/list", version, {**result, "tools": [tool]})
        Tool.model_validate(tool, by_name=False)
    except ValidationError as error:
        name = str(tool.get("name") if isinstance(tool, dict) else tool)[:128]
        reason = f"its entry breaks the protocol ({error.error_count()} faults)"
        return {"name": name, "inputSchema": {"type": "object"}, "_meta": {BROKEN_META: reason}}
    return tool
