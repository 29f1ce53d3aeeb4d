"""`$key` and `$args.NAME` in what is declared: filled into texts, arguments and JMESPath expressions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import jmespath

REFERENCE = re.compile(r"\$(key|args\.([A-Za-z_][A-Za-z0-9_]*))")
STEPS = {"subexpression", "index_expression", "projection", "filter_projection", "value_projection", "flatten", "pipe"}


def with_literals(expression: str, known: Callable[[str], Any]) -> str:
    """A JMESPath expression in which `$key` and `$args.NAME` are replaced by what they stand for."""
    return REFERENCE.sub(lambda m: "`" + json.dumps(known(m[1])).replace("`", "\\`") + "`", expression)


def filled(value: Any, known: Callable[[str], Any]) -> Any:
    """A JSON value with `$key` and `$args.NAME` filled in; a text that is nothing else becomes the very value."""
    if isinstance(value, str):
        if whole := REFERENCE.fullmatch(value):
            return known(whole[1])
        return REFERENCE.sub(lambda m: str(known(m[1])), value)
    if isinstance(value, list):
        return [filled(item, known) for item in value]
    return {k: filled(item, known) for k, item in value.items()} if isinstance(value, dict) else value


def known(key: str, arguments: Mapping[str, Any]) -> Callable[[str], Any]:
    """What `$key` and `$args.NAME` stand for in a call."""
    return lambda name: key if name == "key" else arguments.get(name.removeprefix("args."))


def leading_field(expression: str) -> str | None:
    """The field that a JMESPath expression begins with; None when it begins with something else, such as `@`."""
    node = jmespath.compile(with_literals(expression, lambda name: "")).parsed
    while node["type"] in STEPS:
        node = node["children"][0]
    return str(node["value"]) if node["type"] == "field" else None


def named(value: Any) -> set[str]:
    """The arguments `$args.NAME` that a text, or any text in a JSON value, refers to."""
    if isinstance(value, str):
        return {found[2] for found in REFERENCE.finditer(value) if found[2]}
    inner = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
    return {name for item in inner for name in named(item)}
