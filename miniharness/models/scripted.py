"""A model that gives a prepared answer: for learning, demos and tests. It ships with the product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODEL = "scripted-1"


def respond(request: Mapping[str, Any], tool_input: Mapping[str, Any]) -> dict[str, Any]:
    """A complete Messages response that calls the one tool which `request` forces, with `tool_input`."""
    name = request["tool_choice"]["name"]
    return {
        "id": "msg_scripted",
        "type": "message",
        "role": "assistant",
        "model": request["model"],
        "content": [{"type": "tool_use", "id": "toolu_scripted", "name": name, "input": dict(tool_input)}],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }
