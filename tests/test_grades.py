"""The grade is decided from what was seen, and from nothing else."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping

import pytest

from miniharness.tools.bench import Seen, Written
from miniharness.tools.config import MANUAL, Harness, Tool
from miniharness.tools.grades import (
    Experiment,
    Grade,
    Property,
    claims,
    contradictions,
    fitting,
    grade,
    graded,
    shown,
    unproven,
)
from miniharness.tools.probe import Recovery

REPEAT, KEYED, CONFLICT, LOOK_UP, FENCE = Property
EVERY = [
    dict(zip(Property, seen, strict=True)) for seen in itertools.product((True, False, None), repeat=len(Property))
]
LOOK = {"tool": "items", "found": "items[?key == $key] | [0]", "arguments": {"q": 'a "b" \\ \x7f'}}
DECLARED = Tool.model_validate(
    {
        "recovery": "keyed",
        "key": "key",
        "fences": True,
        "look_up": LOOK,
        "settles_after": 60.0,
        "clean_errors": ["stale", {"message": "^full"}],
        "expect": {"a title": "$args.title", "n": 1, "on": True},
    }
)


def an_experiment(shows: Mapping[Property, bool | None], name: str = "one") -> Experiment:
    return Experiment(name, "did", "saw", shows)


@pytest.mark.parametrize(
    ("has", "wanted"),
    [
        (set(Property), Grade.A),
        (set(Property) - {FENCE}, Grade.B),
        (set(Property) - {CONFLICT}, Grade.B),
        ({REPEAT, KEYED, LOOK_UP}, Grade.B),
        ({REPEAT, LOOK_UP}, Grade.D),
        ({REPEAT, KEYED}, Grade.D),
        ({REPEAT}, Grade.D),
        ({LOOK_UP}, Grade.C),
        ({LOOK_UP, FENCE}, Grade.C),
        ({KEYED, CONFLICT, FENCE}, Grade.F),
        (set(), Grade.F),
    ],
)
@pytest.mark.parametrize("otherwise", [False, None])
def test_each_grade_needs_its_properties(has: set[Property], wanted: Grade, otherwise: bool | None) -> None:
    """What was not seen counts like what was seen to be missing."""
    assert grade({stated: True if stated in has else otherwise for stated in Property}) is wanted


def test_no_grade_is_better_than_the_evidence() -> None:
    """Whatever is taken away from what was seen, the grade does not rise; `keyed` is graded above the others."""
    order = [Grade.F, Grade.C, Grade.D, Grade.B, Grade.A]
    for seen, gone in itertools.product(EVERY, Property):
        assert order.index(grade(seen | {gone: None})) <= order.index(grade(seen))


def test_one_experiment_that_sees_a_property_missing_outweighs_the_others() -> None:
    """In any order; what none has seen stays unseen."""
    for seen in itertools.permutations((True, False, None)):
        assert shown([an_experiment({REPEAT: value}) for value in seen])[REPEAT] is False
    assert shown([an_experiment({FENCE: None}), an_experiment({FENCE: True})])[FENCE] is True
    assert shown([an_experiment({FENCE: None}), an_experiment({})]) == dict.fromkeys(Property)


@pytest.mark.parametrize("seen", EVERY)
def test_the_lines_that_fit_are_accepted_and_claim_only_what_was_seen(seen: dict[Property, bool | None]) -> None:
    """Every combination: `harness.toml` takes the lines, and nothing that they claim was not seen."""
    text = fitting("my server.put", DECLARED, seen)
    tool = Harness.model_validate(tomllib.loads(text)).tools["my server"]["put"]
    assert all(seen[stated] for _, stated in claims(tool))
    assert (tool.expect, tool.clean_errors) == (DECLARED.expect, DECLARED.clean_errors)


def test_the_lines_of_a_right_declaration_are_the_declaration() -> None:
    """What is declared and was seen comes back as it was, texts with quotes and all."""
    text = fitting("s.put", DECLARED, dict.fromkeys(Property, True))
    assert Harness.model_validate(tomllib.loads(text)).tools["s"]["put"] == DECLARED


def test_what_is_declared_and_not_so_is_named_with_the_experiment() -> None:
    """Each line of the declaration against what was seen; what was not seen is told apart."""
    experiments = [an_experiment({LOOK_UP: True, REPEAT: None}), an_experiment({FENCE: False}, "late write")]
    assert contradictions(DECLARED, experiments) == [
        "declared fences = true, but not so: a write older than the last look-up is refused (late write: saw)"
    ]
    assert unproven(DECLARED, experiments) == [
        'declared recovery = "keyed"; not seen: a repeat adds nothing',
        'declared recovery = "keyed"; not seen: one key has one effect',
    ]
    assert contradictions(MANUAL, experiments) == unproven(MANUAL, experiments) == []


def test_an_experiment_that_was_not_tried_says_so() -> None:
    """And one that was says yes, no or not seen of each property."""
    assert an_experiment({}).verdict == "not tried"
    told = graded("s.put", MANUAL, DECLARED, [an_experiment({REPEAT: True, LOOK_UP: False, FENCE: None})])
    assert told["experiments"][0]["verdict"] == (
        "a repeat adds nothing: yes; the look-up is true: no; a write older than the last look-up is refused: not seen"
    )
    assert (told["grade"], told["contradictions"]) == (Grade.D, [])


ITEM = {"id": 1, "action": {}}
THERE, ABSENT, TWICE, UNCOUNTED = Seen(ITEM, 1), Seen(None, 0), Seen(ITEM, 2), Seen(ITEM, None)
HIDDEN, GHOST = Seen(None, 1), Seen(ITEM, 0)
DONE, LOST = Written(), Written(fault="the server is gone")


@pytest.mark.parametrize(
    ("recovery", "repeats", "wanted"),
    [
        (Recovery(DONE, THERE, DONE, THERE), True, {REPEAT: True, LOOK_UP: True}),
        (Recovery(LOST, ABSENT, DONE, THERE), True, {LOOK_UP: True}),
        (Recovery(LOST, THERE, None, THERE), False, {LOOK_UP: True}),
        (Recovery(DONE, THERE, DONE, TWICE), True, {REPEAT: False, LOOK_UP: True}),
        (Recovery(LOST, ABSENT, DONE, TWICE), None, {REPEAT: False, LOOK_UP: True}),
        (Recovery(LOST, ABSENT, DONE, TWICE), False, {LOOK_UP: False}),
        (Recovery(DONE, ABSENT, DONE, THERE), True, {LOOK_UP: False}),
        (Recovery(LOST, ABSENT, DONE, ABSENT), True, {LOOK_UP: False}),
        (Recovery(LOST, HIDDEN, DONE, THERE), True, {REPEAT: True, LOOK_UP: False}),
        (Recovery(LOST, GHOST, DONE, THERE), True, {LOOK_UP: False}),
        (Recovery(DONE, UNCOUNTED, Written(id=1), UNCOUNTED), True, {REPEAT: True, LOOK_UP: True}),
        (Recovery(DONE, UNCOUNTED, DONE, UNCOUNTED), True, {REPEAT: None, LOOK_UP: True}),
    ],
    ids=[
        "answered, kept",
        "lost, absent, written",
        "lost, there, left alone",
        "the repeat was a second effect",
        "a late effect beside the repeat",
        "an absent that was none",
        "answered, not found",
        "written again, not found",
        "counted, not found",
        "found, not counted",
        "the answer names the same",
        "nothing counts",
    ],
)
def test_what_a_dead_server_leaves_is_judged_by_look_up_and_count(
    recovery: Recovery, repeats: bool | None, wanted: Mapping[Property, bool | None]
) -> None:
    """What was found and counted by the next server, before and after the write was sent again."""
    so_far = dict.fromkeys(Property) | {REPEAT: repeats}
    assert recovery.shows(so_far, looks_up=True) == wanted
    assert LOOK_UP not in recovery.shows(so_far, looks_up=False)
