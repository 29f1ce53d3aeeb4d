"""What a tool answered, as it may be shown: secrets masked, and cut at a stated size, the whole kept by its hash."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miniharness.contract import digest
from miniharness.engine import Answer, Json, Tool
from miniharness.errors import ToolUnavailable, UsageError

CARD = re.compile(r"[0-9a-f]{64}|(?<![0-9])[0-9](?:[ -]?[0-9]){11,18}(?![0-9])")
SHAPES = re.compile(
    r"sk-[A-Za-z0-9_-]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[A-Za-z0-9_-]{35}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"
    r"|(?<=Bearer )[A-Za-z0-9._~+/=-]{16,}"
)
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL|PRIVATE_KEY", re.IGNORECASE)
SHORTEST_SECRET = 8  # characters; a shorter value would mask half of the text


def secrets(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The values of environment variables whose names say that they are secret, longest first."""
    found = {value for name, value in environment.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST_SECRET}
    return sorted(found, key=len, reverse=True)


def masked(value: Any, known: Iterable[str]) -> Any:
    """The same JSON value without card numbers, keys that look like keys, and the `known` secrets."""
    if isinstance(value, str):
        for secret in known:
            value = value.replace(secret, "[secret]")
        return CARD.sub(_card, SHAPES.sub("[secret]", value))
    if isinstance(value, list):
        return [masked(item, known) for item in value]
    return {masked(k, known): masked(item, known) for k, item in value.items()} if isinstance(value, dict) else value


def _card(found: re.Match[str]) -> str:
    """A number that passes the check of card numbers keeps its first and last four digits; another stays."""
    digits = re.sub(r"[ -]", "", found[0])
    if len(digits) == 64:  # a digest
        return found[0]
    doubled = [int(d) * (1 + i % 2) for i, d in enumerate(reversed(digits))]
    if sum(d - 9 if d > 9 else d for d in doubled) % 10:
        return found[0]
    return f"{digits[:4]}{'*' * (len(digits) - 8)}{digits[-4:]}"


class MaskedTool:
    """A tool port whose words, for the history and for errors, hide secrets. What is looked up stays as it is: it has
    to be compared with the goal."""

    def __init__(self, tool: Tool, known: Sequence[str]) -> None:
        self._tool = tool
        self._known = known

    async def connect(self) -> Json:
        """As the tool does."""
        with self._quiet():
            return await self._tool.connect()

    async def look_up(self, key: str, epoch: int) -> Json | None:
        """As the tool does."""
        with self._quiet():
            return await self._tool.look_up(key, epoch)

    async def dispatch(self, key: str, action: Json, epoch: int) -> Answer:
        """As the tool does."""
        answer = await self._tool.dispatch(key, action, epoch)
        return Answer(answer.outcome, masked(answer.message, self._known))

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        try:
            yield
        except ToolUnavailable as error:
            raise type(error)(masked(str(error), self._known)) from error


def cut(text: str, limit: int, folder: Path) -> str:
    """`text`, or as much of it as `limit` bytes hold with a word on what is missing; the whole is kept in `folder`."""
    size = len(text.encode())
    if size <= limit:
        return text
    name = digest(text)
    path = folder / "results" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    shown = text.encode()[:limit].decode("utf-8", "ignore")
    return f"{shown}\n[cut: {limit} of {size} bytes; the whole: miniharness --state-dir {folder} result {name}]"


def kept(folder: Path, name: str) -> str:
    """The whole of a result that was cut.

    Raises:
        UsageError: there is none of that hash.
    """
    path = folder / "results" / name
    if not re.fullmatch(r"[0-9a-f]{64}", name) or not path.is_file():
        raise UsageError(f"there is no result {name!a} in {folder / 'results'}")
    return path.read_text(encoding="utf-8")
