"""Figures of several cycles as text: medians with their range, the two tables, and the targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Cycles = Sequence[dict[str, float]]
NOT_THERE = "–"


def values(cycles: Cycles, name: str) -> list[float]:
    """A figure in each cycle that has it."""
    return [cycle[name] for cycle in cycles if name in cycle]


def ratios(cycles: Cycles, name: str, other: str) -> list[float]:
    """One figure over another one of the same cycle."""
    return [cycle[name] / cycle[other] for cycle in cycles if name in cycle and other in cycle]


def number(value: float) -> str:
    """A figure with three digits that count."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.{2 if abs(value) < 10 else 1}f}"


def told(found: Sequence[float], unit: str = "") -> str:
    """The median and, between brackets, the range; a dash when there is nothing."""
    if not found:
        return NOT_THERE
    middle = number(statistics.median(found)) + unit
    if len(found) == 1:
        return middle
    return f"{middle} [{number(min(found))}–{number(max(found))}]"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are as wide as they must be."""
    lines = [list(head), ["-"] * len(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = []
    for line in lines:
        fill = "-" if line[0] == "-" else " "
        text.append("| " + " | ".join(cell.ljust(width, fill) for cell, width in zip(line, widths, strict=True)) + " |")
    return "\n".join(text)


ENGINE_ROWS = (
    ("6 steps, one at a time: ms per run", "{}.6.ms"),
    ("100 steps, one at a time: ms per run", "{}.100.ms"),
    ("32 in flight, 6 steps: steps/s", "{}.flying.6.steps/s"),
    ("32 in flight, 100 steps: steps/s", "{}.flying.100.steps/s"),
    ("kill -9 with 200 in flight: s from the new start until all have ended", "{}.recovery.s"),
    ("… steps run again; of Mini Harness: requests of any kind made again", "{}.recovery.again"),
    ("kB on disk per 6-step run", "{}.bytes.kB"),
    ("peak memory with 32 in flight, MB, with servers", "{}.rss.MB"),
    ("process start to the first result, ms", "{}.first.ms"),
)
RELATIVE = {
    "{}.6.ms": ("… × floor", "floor.6.ms"),
    "{}.100.ms": ("… × floor", "floor.100.ms"),
    "{}.flying.6.steps/s": ("… Mini Harness has × this", ""),
    "{}.flying.100.steps/s": ("… Mini Harness has × this", ""),
    "{}.recovery.s": ("… Mini Harness needs × this", ""),
}


def engines(cycles: Cycles, peers: Sequence[str], titles: Sequence[str]) -> str:
    """The same work everywhere: the floor, this engine, the others."""
    names = ["floor", "ours", *peers]
    rows = []
    for title, pattern in ENGINE_ROWS:
        rows.append([title, *(told(values(cycles, pattern.format(name))) for name in names)])
        if pattern in RELATIVE:
            relative, base = RELATIVE[pattern]
            own = pattern.format("ours")
            found = []
            for name in names:
                beside = pattern.format(name).rpartition(".")[0] + ".beside"  # measured next to this peer
                near = beside if values(cycles, beside) else base or own
                found.append(ratios(cycles, *((pattern.format(name), near) if base else (near, pattern.format(name)))))
            rows.append([relative, *(told(one) for one in found)])
    return markdown(["measure", "floor (bare sqlite3)", "Mini Harness", *titles], rows)


OWN_ROWS: tuple[tuple[str, str, str], ...] = (
    ("floor with a compare-and-set of the run's row, 6 steps: ms", "raw.6.ms", ""),
    ("… Mini Harness × this", "ours.6.ms", "raw.6.ms"),
    ("floor with a compare-and-set of the run's row, 100 steps: ms", "raw.100.ms", ""),
    ("… Mini Harness × this", "ours.100.ms", "raw.100.ms"),
    ("a whole run of 8 transitions through `drive`, model and tool do nothing: ms", "ours.whole.ms", ""),
    ("… × floor of 8 steps", "ours.whole.ms", "floor.8.ms"),
    ("the same, 32 in flight: runs/s", "ours.whole.runs/s", ""),
    ("recovery: dispatches whose answer was lost in the kill, though their effect is there", "ours.recovery.doubt", ""),
    ("… dispatches sent again", "ours.recovery.writes", ""),
    ("… dispatches debited and then not sent", "ours.recovery.unused", ""),
    *(
        row
        for count in (1, 4, 16)
        for row in (
            (f"{count} processes on one file: steps/s in all", f"ours.many.{count}.steps/s", ""),
            ("… bare sqlite3 with its own busy handler: steps/s", f"floor.many.{count}.steps/s", ""),
            ("… slowest single step: ms", f"ours.many.{count}.worst.ms", ""),
            ("… bare sqlite3: ms", f"floor.many.{count}.worst.ms", ""),
            ("… steps given up as locked", f"ours.many.{count}.errors", ""),
            ("… bare sqlite3: steps given up as locked", f"floor.many.{count}.errors", ""),
        )
    ),
    ("a whole run in a journal with 10 finished ones: ms", "ours.few.ms", ""),
    ("… with this many finished ones", "ours.stored", ""),
    ("… ms", "ours.many.ms", ""),
    ("… × that with 10", "ours.many.ms", "ours.few.ms"),
    ("whole process, `python -c pass`: ms", "pass.ms", ""),
    ("whole process, plain SDK client and server, three calls: ms", "plain.ms", ""),
    ("whole process, `lab.py --execute`, the same calls: ms", "lab.ms", ""),
    ("… × plain SDK", "lab.ms", "plain.ms"),
    ("whole process, re-reading a finished run: ms", "reread.ms", ""),
    ("… × pass", "reread.ms", "pass.ms"),
    ("the plain SDK's client making the same three calls, 32 in flight: tickets/s", "plain.runs/s", ""),
    ("… whole lab with 1 server × this", "batch.1.steady.runs/s", "plain.runs/s"),
    *(
        row
        for count in (1, 2)
        for row in (
            (
                f"whole lab, 32 in flight, {count} server(s): runs/s, start and end included",
                f"batch.{count}.runs/s",
                "",
            ),
            ("… between the first and the last result: runs/s", f"batch.{count}.steady.runs/s", ""),
            ("… processor time of the engine: ms per run", f"batch.{count}.engine.ms", ""),
            ("… processor time of the servers: ms per run", f"batch.{count}.servers.ms", ""),
            ("… processors kept busy by the engine", f"batch.{count}.engine.busy", ""),
            ("… processors kept busy by the servers", f"batch.{count}.servers.busy", ""),
        )
    ),
)


def own(cycles: Cycles) -> str:
    """What has no counterpart in the other engines."""
    rows = []
    for title, name, base in OWN_ROWS:
        found = ratios(cycles, name, base) if base else values(cycles, name)
        rows.append([title, told(found) if found else "not there"])
    return markdown(["measure", "value"], rows)


@dataclass(frozen=True)
class Target:
    """A promise about a figure, judged by its median over the cycles."""

    text: str
    found: Callable[[Cycles], list[float]]
    met: Callable[[float], bool]


def _over(name: str, base: str) -> Callable[[Cycles], list[float]]:
    return lambda cycles: ratios(cycles, name, base)


def _beyond_start(cycles: Cycles) -> list[float]:
    return [c["reread.ms"] - 4 * c["pass.ms"] for c in cycles if "reread.ms" in c]


TARGETS = (
    Target("6 steps, one at a time: at most 1.5 × floor", _over("ours.6.ms", "floor.6.ms"), lambda v: v <= 1.5),
    Target("100 steps, one at a time: at most 1.3 × floor", _over("ours.100.ms", "floor.100.ms"), lambda v: v <= 1.3),
    Target(
        "32 in flight, 6 steps: at least 12 × Restate",
        _over("restate.flying.6.beside", "restate.flying.6.steps/s"),
        lambda v: v >= 12,
    ),
    Target(
        "32 in flight, 6 steps: at least 18 × LangGraph sync",
        _over("langgraph.flying.6.beside", "langgraph.flying.6.steps/s"),
        lambda v: v >= 18,
    ),
    Target(
        "recovery: at most 0.6 of LangGraph's time",
        _over("ours.recovery.s", "langgraph.recovery.s"),
        lambda v: v <= 0.6,
    ),
    Target("recovery: no dispatch repeated", lambda c: values(c, "ours.recovery.writes"), lambda v: v == 0),
    Target(
        "whole lab: at least 200 runs/s, 1 server, from the first result to the last",
        lambda c: values(c, "batch.1.steady.runs/s"),
        lambda v: v >= 200,
    ),
    Target("`lab.py --execute`: at most 0.65 of plain SDK", _over("lab.ms", "plain.ms"), lambda v: v <= 0.65),
    Target("re-read: at most 4 × pass + 60 ms; ms beyond 4 × pass", _beyond_start, lambda v: v <= 60),
    Target("at most 4 kB per 6-step run", lambda c: values(c, "ours.bytes.kB"), lambda v: v <= 4),
)


def targets(cycles: Cycles) -> str:
    """Each promise, what was measured, and whether it was kept."""
    rows = []
    for target in TARGETS:
        found = target.found(cycles)
        verdict = NOT_THERE
        if found:
            verdict = "met" if target.met(statistics.median(found)) else "**not met**"
        rows.append([target.text, told(found), verdict])
    return markdown(["target", "measured", ""], rows)
