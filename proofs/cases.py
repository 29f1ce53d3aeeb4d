"""Which accidents happen to which run: every commit boundary in order, then as many drawn ones as are asked for.

Everything follows from the seed and the case's name, so one case alone can be repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from proofs.accident import Accident, Notes
from proofs.process import DISPATCH, Process, Scene
from proofs.tool import ANSWERED, FAULTS, Fault
from proofs.trial import Case

SIDES = ("engine", "server")
WORLDS = ("plain", "keyed")
LOOP = 8
WINDOW = (
    ("engine", "before", DISPATCH),
    ("server", "before", "insert into tickets"),
    ("server", "before", ANSWERED),
    ("engine", "after", DISPATCH),
)
"""The dispatch window: intent on disk and nothing sent; arrived; written and not answered; answered, not recorded."""
SAME = {
    "kill-before": (("engine", "before", DISPATCH), ("server", "before", "insert into tickets")),
    "kill-after": (("engine", "after", DISPATCH), ("server", "before", ANSWERED)),
}
"""The accidents of the other engines' table; there one process is engine and tool, here they are two."""
ROWS = {
    "same": "the accidents of the second table",
    "kill": "killed at every commit boundary",
    "kill-any": "killed at every other statement",
    "turns": "engine and server killed in turn, four lives",
    "loop": f"killed at the same point of the dispatch window, {LOOP} lives on end",
    "freeze": "frozen at every commit boundary, taken over, thawed",
    "full": "disk full from a commit boundary on",
    "busy": "file held by another program from a commit boundary on",
    "tool": "faulty tool",
    "mixed": "drawn: several lives, sides, accidents, faults, cancels",
}


@dataclass(frozen=True)
class Moments:
    """What a life without accidents executes: for each side the statements, in order."""

    statements: Mapping[str, Sequence[str]]

    def boundaries(self, side: str) -> list[tuple[str, str]]:
        """Before and after each statement that begins or commits a transaction, and around the call itself."""
        marks = ("begin immediate", "commit", "-- ")
        numbers = [k for k, sql in enumerate(self.statements[side], start=1) if sql.startswith(marks)]
        return [(moment, str(k)) for k in numbers for moment in ("before", "after")]

    def others(self, side: str) -> list[tuple[str, str]]:
        """Before each other statement."""
        known = {k for _, k in self.boundaries(side)}
        return [("before", str(k)) for k in range(1, len(self.statements[side]) + 1) if str(k) not in known]


def measure(disk: Path) -> Moments:
    """Let one run live without accidents and note its statements."""
    folder = disk / "state"
    folder.mkdir(parents=True)
    notes = Notes()
    argv = ["lab.py", "--state-dir", str(folder), "--execute", "--json"]
    process = Process(Scene(folder, notes, transcript=True), argv)
    if process.wait() != 0:
        raise RuntimeError(f"a run without accidents failed: {process.errors}")
    found = {note["side"]: note["transcript"] for note in notes.read("transcript")}
    notes.close()
    return Moments({side: found[side] for side in SIDES})


def planned(moments: Moments, seed: int, stride: int, actions: Sequence[str]) -> Iterator[Case]:
    """Every commit boundary, or with a stride every so many-th, from a place that the seed chooses."""
    for world, side in itertools.product(WORLDS, SIDES):
        plain = world == "plain"
        for action in actions if plain else [a for a in actions if a in ("kill", "kill-any", "freeze")]:
            points = moments.others(side) if action == "kill-any" else moments.boundaries(side)
            first = Random(f"{seed}/{world}/{side}/{action}").randrange(stride)
            for moment, at in points[first :: stride if action.startswith("kill") or stride == 1 else 2 * stride]:
                name = f"{action}/{side}/{world}/{moment}-{at}"
                accident = Accident(side, action.partition("-")[0], moment, at)
                yield Case(name, action if action != "pause" else "busy", (accident,), plain=plain)
    yield from _turns(moments, seed, stride)
    yield from _loops(stride)
    yield from _same()
    for world, fault, times in itertools.product(
        *((WORLDS, FAULTS, (1, 2, 5)) if stride == 1 else (WORLDS[:1], FAULTS, (1,)))
    ):
        for cancel in (False, True):
            name = f"tool/{fault}/{world}/{times}{'-cancel' if cancel else ''}"
            lives = (Accident("engine", "kill", "after", DISPATCH),) if cancel else ()
            yield Case(name, "tool", lives, Fault(fault, times), plain=world == "plain", cancel=cancel)


def _turns(moments: Moments, seed: int, stride: int) -> Iterator[Case]:
    for world, side in itertools.product(WORLDS, SIDES):
        for moment, at in moments.boundaries(side)[:: stride * 2]:
            name = f"turns/{side}/{world}/{moment}-{at}"
            draw = Random(f"{seed}/{name}")
            lives = [Accident(side, "kill", moment, at)]
            for number in range(3):
                other = SIDES[(SIDES.index(side) + number + 1) % 2]
                lives.append(Accident(other, "kill", *draw.choice(moments.boundaries(other))))
            yield Case(name, "turns", tuple(lives), plain=world == "plain")


def _same() -> Iterator[Case]:
    for world, (accident, places), action in itertools.product(WORLDS, SAME.items(), ("kill", "freeze")):
        for side, moment, text in places:
            name = f"same/{side}/{world}/{accident.replace('kill', action)}"
            yield Case(name, "same", (Accident(side, action, moment, text),), plain=world == "plain")


def _loops(stride: int) -> Iterator[Case]:
    limits = (1, 2, 3) if stride == 1 else (1, 3)
    for world, (number, (side, moment, text)), limit in itertools.product(WORLDS, enumerate(WINDOW, 1), limits):
        loop = (Accident(side, "kill", moment, text),) * LOOP
        yield Case(f"loop/{number}/{world}/limit-{limit}", "loop", loop, plain=world == "plain", dispatches=limit)


def drawn(moments: Moments, seed: int, number: int, actions: Sequence[str]) -> Case:
    """The case of that number: mostly kills, anywhere, in up to eight lives."""
    name = f"mixed/{number:05d}"
    draw = Random(f"{seed}/{name}")
    lives = []
    for life in range(draw.randint(1, 8)):
        side = draw.choice(SIDES)
        points = draw.choice((moments.boundaries(side), moments.boundaries(side) + moments.others(side)))
        moment, at = draw.choice(points[: len(points) // 2] if life else points)  # a later life has less to do
        if draw.random() < 0.25:
            side, moment, at = draw.choice(WINDOW)
        others = [action for action in actions if action not in ("kill", "kill-any")]
        action = draw.choice(others) if others and draw.random() < 0.12 else "kill"
        lives.append(Accident(side, action, moment, at))
    fault = Fault(draw.choice(FAULTS), draw.randint(1, 3)) if draw.random() < 0.2 else None
    return Case(
        name,
        "mixed",
        tuple(lives),
        fault,
        plain=draw.random() < 0.5,
        dispatches=draw.randint(1, 3),
        cancel=draw.random() < 0.15,
        permit=draw.random() < 0.9,
    )
