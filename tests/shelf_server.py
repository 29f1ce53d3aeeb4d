"""A tool server of the standard library alone, which can be recovered as well as its switches say.

    shelf_server.py FILE [SWITCH ...]

Its items are one JSON file; a log beside it tells when a server began, and when it left in good order. `put` adds an
item, `set` gives one its status. The switches:

    keyed     `put` writes once for each key
    conflict  `put` refuses other content under a used key
    fence     `put` refuses what is older than the last look-up
    forgets   keys and fences are kept in the memory of the process alone
    forks     `put` writes everything twice
    lags      what `put` writes is there after the next `put`
    lies      no query finds anything
    alone     no other server may run beside it
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Json = dict[str, Any]
FILE, SWITCHES = Path(sys.argv[1]), set(sys.argv[2:])
EPOCH, KEY = "io.github.miniharness/epoch", "io.github.miniharness/operation-key"
MEMORY: Json = {"keys": {}, "fences": {}}
TEXT = {"type": "string"}
TOOLS = {"put": ["key", "title"], "set": ["title", "status"], "items": [], "find": ["key"]}


class Refused(Exception):
    """An error that changed nothing; its code."""


@contextmanager
def shelf() -> Iterator[Json]:
    """The items, keys and fences, for one call alone; what is changed is kept."""
    with FILE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = json.loads(FILE.read_text()) if FILE.exists() else {"items": [], "keys": {}, "fences": {}, "late": []}
        kept |= MEMORY if "forgets" in SWITCHES else {}
        yield kept
        new = FILE.with_suffix(".new")
        new.write_text(json.dumps(kept))
        new.replace(FILE)


def put(arguments: Json, meta: Json) -> Json:
    with shelf() as kept:
        key, title = arguments["key"], arguments["title"]
        if "fence" in SWITCHES and meta.get(EPOCH, 0) < kept["fences"].get(key, 0):
            raise Refused("stale")
        if "keyed" in SWITCHES and key in kept["keys"]:
            if "conflict" in SWITCHES and kept["keys"][key] != title:
                raise Refused("conflict")
            return {"done": True}
        kept["keys"][key] = title
        new = [{"key": key, "title": title, "status": ""}] * (2 if "forks" in SWITCHES else 1)
        kept["items"] += kept["late"] if "lags" in SWITCHES else new
        kept["late"] = new
    return {"done": True}


def set_status(arguments: Json) -> Json:
    with shelf() as kept:
        known = next((item for item in kept["items"] if item["title"] == arguments["title"]), None)
        if known is None:
            kept["items"].append(known := {"key": ""})
        known.update(arguments)
    return {"done": True}


def items(meta: Json) -> list[Json]:
    with shelf() as kept:
        if "fence" in SWITCHES and EPOCH in meta:
            kept["fences"][meta[KEY]] = max(meta[EPOCH], kept["fences"].get(meta[KEY], 0))
        return [] if "lies" in SWITCHES else kept["items"]


def call(name: str, arguments: Json, meta: Json) -> Json:
    if name == "put":
        return put(arguments, meta)
    if name == "set":
        return set_status(arguments)
    found = items(meta)
    if name == "items":
        return {"items": found}
    return {"item": next((item for item in found if item["key"] == arguments["key"]), None)}


def result(method: str, params: Json) -> Json:
    if method == "initialize":
        info = {"name": "shelf", "version": "1"}
        return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        schema = {n: {"type": "object", "properties": dict.fromkeys(a, TEXT), "required": a} for n, a in TOOLS.items()}
        hints = {"set": {"idempotentHint": True}, "items": {"readOnlyHint": True}}
        return {"tools": [{"name": n, "inputSchema": s, "annotations": hints.get(n, {})} for n, s in schema.items()]}
    try:
        content, failed = call(params["name"], params["arguments"], params.get("_meta", {})), False
    except Refused as refused:
        content, failed = {"error": {"code": str(refused), "message": f"it is {refused}"}}, True
    return {"content": [], "structuredContent": content, "isError": failed}


def note(word: str) -> None:
    with FILE.with_suffix(".log").open("a") as log:
        print(word, file=log)


if __name__ == "__main__":
    note("began")
    if "alone" in SWITCHES:
        alone = FILE.with_suffix(".alone").open("w")
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            told = result(message["method"], message.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": told}), flush=True)
    note("left")
