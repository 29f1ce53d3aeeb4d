"""What experiments with a tool showed, the grade that follows, and the lines of `harness.toml` that fit.

Knows no server and tries nothing: that is `probe.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from miniharness.tools.config import Tool


class Property(StrEnum):
    """What a tool can be seen to have."""

    REPEAT = "repeat"
    KEYED = "keyed"
    CONFLICT = "conflict"
    LOOK_UP = "look_up"
    FENCE = "fence"


STATED = {
    Property.REPEAT: "a repeat adds nothing",
    Property.KEYED: "one key has one effect",
    Property.CONFLICT: "other content under a key is refused",
    Property.LOOK_UP: "the look-up is true",
    Property.FENCE: "a write older than the last look-up is refused",
}

Shown = Mapping[Property, bool | None]
"""For each property whether it was seen, seen to be missing, or neither (None)."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment: what was done, what was seen, and what that shows."""

    name: str
    did: str
    saw: str
    shows: Shown

    @property
    def verdict(self) -> str:
        """What it shows, in words."""
        words = {True: "yes", False: "no", None: "not seen"}
        return "; ".join(f"{STATED[stated]}: {words[seen]}" for stated, seen in self.shows.items()) or "not tried"


class Grade(StrEnum):
    """How well an unknown outcome of a write can be recovered from."""

    A = "A"
    B = "B"
    C = "C"
    D = "D"
    F = "F"


MEANS = {
    Grade.A: "keyed; other content is refused, the look-up is true, late writes are fenced",
    Grade.B: "keyed, and the look-up is true; not fenced, or other content under a used key is not refused",
    Grade.C: "look-up only: nothing but the look-up tells what became of a write",
    Grade.D: "idempotent: a repeat adds nothing",
    Grade.F: "a repeat has a second effect, or was not seen to have none, and no look-up tells what is there",
}

GRADES = (
    (Grade.A, set(Property)),
    (Grade.B, {Property.REPEAT, Property.KEYED, Property.LOOK_UP}),
    (Grade.D, {Property.REPEAT}),
    (Grade.C, {Property.LOOK_UP}),
)
"""What each grade needs to have been seen. The first that has it all counts; otherwise it is F."""

RECOVERY = {Grade.A: "keyed", Grade.B: "keyed", Grade.C: "lookup", Grade.D: "idempotent", Grade.F: "manual"}


def shown(experiments: Iterable[Experiment]) -> dict[Property, bool | None]:
    """What all experiments together show: one that sees a property missing outweighs those that see it."""
    seen: dict[Property, bool | None] = dict.fromkeys(Property)
    for experiment in experiments:
        for stated, value in experiment.shows.items():
            if seen[stated] is not False and value is not None:
                seen[stated] = value
    return seen


def grade(seen: Shown) -> Grade:
    """The grade of a tool with these properties; what was not seen does not count."""
    has = {stated for stated, value in seen.items() if value}
    return next((mark for mark, needed in GRADES if needed <= has), Grade.F)


def claims(declared: Tool) -> list[tuple[str, Property]]:
    """What a declaration says of the tool, each line with the property that it claims."""
    recovery = f'recovery = "{declared.recovery}"'
    made = [(recovery, Property.REPEAT)] if declared.deduplicates else []
    made += [(recovery, Property.KEYED)] if declared.recovery == "keyed" else []
    if declared.outcome:
        return [("outcome = true", stated) for stated in Property]
    made += [("look_up", Property.LOOK_UP)] if declared.look_up else []
    return made + ([("fences = true", Property.FENCE)] if declared.fences else [])


def contradictions(declared: Tool, experiments: Sequence[Experiment]) -> list[str]:
    """What is declared and was seen to be otherwise, each with what was seen."""
    told = []
    for line, stated in claims(declared):
        against = [experiment for experiment in experiments if experiment.shows.get(stated) is False]
        if against:
            told.append(f"declared {line}, but not so: {STATED[stated]} ({against[0].name}: {against[0].saw})")
    return told


def unproven(declared: Tool, experiments: Sequence[Experiment]) -> list[str]:
    """What is declared and could not be seen."""
    seen = shown(experiments)
    return [f"declared {line}; not seen: {STATED[stated]}" for line, stated in claims(declared) if seen[stated] is None]


def graded(full_name: str, declared: Tool, probed: Tool, experiments: Sequence[Experiment]) -> dict[str, Any]:
    """The report of a probe: `SERVER.TOOL` is `declared` so, and was probed with the key and look-up of `probed`."""
    seen = shown(experiments)
    mark = grade(seen)
    return {
        "tool": full_name,
        "grade": mark,
        "means": MEANS[mark],
        "shown": seen,
        "experiments": [
            {"name": e.name, "did": e.did, "saw": e.saw, "shows": e.shows, "verdict": e.verdict} for e in experiments
        ],
        "contradictions": contradictions(declared, experiments),
        "unproven": unproven(declared, experiments),
        "harness_toml": fitting(full_name, probed, seen),
    }


def fitting(full_name: str, tool: Tool, seen: Shown) -> str:
    """The table of `harness.toml` that fits what was seen of `SERVER.TOOL`, which was probed as `tool`."""
    mark = grade(seen)
    kept = tool.model_dump(exclude_defaults=True, exclude_none=True)
    lines: dict[str, Any] = {"recovery": RECOVERY[mark]}
    if tool.outcome:
        lines = {"recovery": "keyed", "outcome": True} if mark is Grade.A else {"recovery": "manual"}
    elif mark is not Grade.F:
        lines |= {"key": kept["key"]} if "key" in kept else {}
        if seen[Property.LOOK_UP]:
            lines |= {"fences": True} if seen[Property.FENCE] else {}
            lines |= {"look_up": kept["look_up"]}
    about_recovery = {"recovery", "key", "look_up", "fences", "outcome"}
    about_recovery |= {"settles_after"} if mark is Grade.F else set()
    lines |= {name: value for name, value in kept.items() if name not in about_recovery}
    head = ".".join(_name(part) for part in ("tools", *full_name.split(".", 1)))
    return "\n".join([f"[{head}]", *(f"{_name(name)} = {_toml(value)}" for name, value in lines.items())])


def _name(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else _toml(text)


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_name(name)} = {_toml(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
