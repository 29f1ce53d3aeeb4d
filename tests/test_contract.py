"""The rules for text, run ids, JSON, contracts and differences, and that every door applies the same one."""

from __future__ import annotations

import itertools
import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import GOAL
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mcp import Client

import lab as ticket_lab
import model
from miniharness.check import describe, differences
from miniharness.contract import Budget, Contract, canonical, check_identifier, digest, text_fault
from miniharness.errors import ProposalRejected, UsageError
from miniharness.models import scripted
from server import build
from store import Runs, Tickets

ACCEPTED_TEXT = {
    "one letter": "a",
    "300 code points": "核" * 300,
    "300 code points outside the basic plane": "😀" * 300,
    "combining characters": "e\u0301\u0327",
    "a combining character alone": "\u0301",
    "an emoji ZWJ sequence": "👩\u200d🔬 核验",
    "white space around something": "  a\u3000",
    "a no-break space inside": "a\u00a0b",
    "right to left": "שלום",
}
REFUSED_TEXT = {
    "empty": ("", "empty"),
    "301 code points": ("a" * 301, "at most 300"),
    "a lone high surrogate": ("a\ud83d", "surrogate"),
    "a lone low surrogate": ("\ude00a", "surrogate"),
    "NUL": ("a\0b", "control character"),
    "a tab": ("a\tb", "control character"),
    "a line break": ("a\n", "control character"),
    "a next-line character": ("a\x85b", "control character"),
    "only spaces": ("   ", "white space"),
    "only wide and no-break spaces": ("\u3000\u00a0\u2003", "white space"),
    "only zero-width characters": ("\u200b\u200d\ufeff\u2060", "white space"),
    "zero-width characters and spaces": (" \u200b ", "white space"),
    "a number": (7, "not int"),
    "true": (True, "not bool"),
    "null": (None, "not NoneType"),
    "bytes": (b"a", "not bytes"),
    "a list": (["a"], "not list"),
}
RUN_IDS = ("a", "0", "review-001", "A.b_c-9", "x" * 64)
BAD_RUN_IDS = {
    "empty": "",
    "65 characters": "x" * 65,
    "500 characters": "x" * 500,
    "a path": "../x",
    "dots": "..",
    "a hyphen first": "-x",
    "a line break": "a\nb",
    "a line break at the end": "a\n",
    "a quote": "a'b",
    "a double quote": 'a"b',
    "a slash": "a/b",
    "a backslash": "a\\b",
    "a space": "a b",
    "NUL": "a\0b",
    "CJK": "核验",
    "other digits": "٣",
    "a lone surrogate": "\udcff",
}

words = st.text(st.characters(), max_size=6)  # surrogates included
hostile = st.one_of(
    words,
    st.text(st.characters(categories=["Zs", "Cf", "Mn"]), max_size=6),
    st.text(st.characters(categories=["Cs", "Cc", "Cn", "Co", "L"]), max_size=4),
    st.integers(298, 303).map("a".__mul__),
    st.sampled_from(
        [*ACCEPTED_TEXT.values(), *(value for value, _ in REFUSED_TEXT.values() if isinstance(value, str))]
    ),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(st.sampled_from("abc"), json_values, max_size=3)


def contract(**change: Any) -> Contract:
    given = {"goal": GOAL, "tool": ticket_lab.TOOL, "provider": "fixture", "model": "m", "command": "c"} | change
    return Contract(**given)


def same(a: Any, b: Any) -> bool:
    """Equal as JSON values, types included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ACCEPTED_TEXT.values(), ids=ACCEPTED_TEXT)
def test_text_with_something_to_see_is_accepted(text: str) -> None:
    """1 to 300 code points with something visible pass, in whatever script."""
    assert text_fault(text) is None


@pytest.mark.parametrize(("value", "rule"), REFUSED_TEXT.values(), ids=REFUSED_TEXT)
def test_text_that_breaks_the_rule_is_told_which_part(value: object, rule: str) -> None:
    """Each refusal names its rule and quotes nothing of the value."""
    fault = text_fault(value)
    assert fault is not None
    assert rule in fault
    assert len(fault) < 100


@given(hostile, st.sampled_from(["\0", "\n", "\x7f", "\x9f", "\ud800", "\udfff"]), st.integers(0, 6))
def test_no_surrounding_makes_a_forbidden_character_acceptable(text: str, forbidden: str, at: int) -> None:
    """A control character or half a surrogate pair is refused wherever it stands."""
    assert text_fault(text[:at] + forbidden + text[at:]) is not None


@given(hostile)
def test_accepted_text_survives_every_encoding_on_its_way(text: str) -> None:
    """What is accepted goes through UTF-8 and JSON unchanged, and one visible character more never spoils it."""
    if text_fault(text) is None:
        assert text.encode().decode() == text
        assert json.loads(canonical({"title": text}))["title"] == text
        assert "\n" not in text
        assert len(text) == 300 or text_fault(text + "a") is None


# -- one rule at every door -------------------------------------------------------------------------------------------


def goal_accepts(action: dict[str, str]) -> bool:
    try:
        ticket_lab.contract_for(None, action, provider=None, model=None, budget=None, deadline=None)
    except UsageError:
        return False
    return True


def proposal_accepts(action: dict[str, str]) -> bool:
    try:
        return model.parse_response(scripted.respond(model.request_for(GOAL, "m"), action))[0] == action
    except ProposalRejected:
        return False


def rule_accepts(action: dict[str, str]) -> bool:
    try:
        return model.validate_action(action) == action
    except UsageError:
        return False


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("world") / "tickets.sqlite"
    tickets = Tickets(path)
    yield tickets, itertools.count()
    tickets.close()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("a\ud83d", "title")
@example("a\0", "source")
@example("a" * 300, "title")
@example("a" * 301, "title")
@example("\u200b", "source")
@given(hostile, st.sampled_from(["source", "title"]))
async def test_goal_proposal_and_server_accept_the_same_text(world: Any, text: str, field: str) -> None:
    """For any text, goal, proposal and server decide alike, and a refused one writes nothing."""
    tickets, numbers = world
    action, key = GOAL | {field: text}, f"k-{next(numbers)}"
    async with Client(build(tickets)) as client:
        result = await client.call_tool("create_review_ticket", {"operation_key": key, **action})
    written = tickets.look_up(key)
    accepted = text_fault(text) is None
    assert goal_accepts(action) is proposal_accepts(action) is rule_accepts(action) is accepted
    assert result.is_error is not accepted
    assert (written and written.action.model_dump()) == (action if accepted else None)
    if not accepted:
        assert result.structured_content["error"]["code"] == "invalid"


@pytest.mark.parametrize(
    ("action", "rule"),
    [
        (None, "must be an object"),
        ([("source", "a"), ("title", "b")], "must be an object"),
        ({"source": "a"}, "no title"),
        ({"title": "a"}, "no source"),
        ({}, "no source"),
        (GOAL | {"approved": True}, "'approved'"),
        (GOAL | {"operation_key": "x", "approved": True}, "'approved', 'operation_key'"),
        (GOAL | {"x" * 10_000: 1}, "not allowed"),
        (GOAL | {"\ud83d": 1}, r"\\ud83d"),
    ],
    ids=lambda value: str(value)[:30].encode("ascii", "replace").decode() if isinstance(value, str) else None,
)
def test_an_action_is_exactly_source_and_title(action: object, rule: str) -> None:
    """A missing field, an extra field and another shape are refused with a short reason that can be printed."""
    with pytest.raises(UsageError) as refused:
        model.validate_action(action)
    assert rule.replace(r"\\", "\\") in str(refused.value)
    assert len(str(refused.value).encode()) < 300


# -- run ids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_id", RUN_IDS)
def test_a_run_id_of_the_allowed_characters_is_returned_as_it_is(run_id: str) -> None:
    """1 to 64 letters, digits, dots, underscores and hyphens, a letter or digit first, can name a run."""
    assert check_identifier(run_id) == run_id


@pytest.mark.parametrize("run_id", BAD_RUN_IDS.values(), ids=BAD_RUN_IDS)
async def test_any_other_run_id_is_refused_with_the_rule_and_leaves_no_run(tmp_path: Path, run_id: str) -> None:
    """`execute` states the one rule in a line that can be printed; no row, no event and no file come of it."""
    with pytest.raises(UsageError, match="use 1 to 64 of A-Z") as refused:
        await ticket_lab.execute(tmp_path / "state", run=run_id, execute_write=True)
    assert str(refused.value).isascii()
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 250
    runs = Runs(tmp_path / "state")
    assert list(runs.all()) == []
    runs.close()
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert not (tmp_path / "state" / "tickets.sqlite").exists()


@given(st.text(st.characters(), max_size=70))
def test_an_accepted_run_id_is_safe_in_a_path_a_shell_and_a_key(run_id: str) -> None:
    """What is accepted holds nothing that a path, a shell, a line or an operation key could misread."""
    try:
        check_identifier(run_id)
    except UsageError:
        return
    assert run_id.isascii()
    assert run_id[0].isalnum()
    assert not set(run_id) & set("/\\:;'\"$`&|<>*?!#~()[]{} \n\t\0")


# -- JSON and differences ---------------------------------------------------------------------------------------------


@given(json_values, json_values)
def test_equal_canonical_texts_mean_equal_values(a: Any, b: Any) -> None:
    """The canonical text decides equality of JSON values, and can be read back."""
    assert (canonical(a) == canonical(b)) is same(a, b)
    assert same(json.loads(canonical(a)), a)
    assert len(digest(canonical(a))) == 64


@given(json_objects)
def test_the_order_of_keys_does_not_show_in_the_canonical_text(value: dict[str, Any]) -> None:
    """Keys are sorted, so one value has one text and one digest."""
    assert canonical(dict(reversed(value.items()))) == canonical(value)


def test_the_canonical_text_is_short_readable_and_pure_json() -> None:
    """No spaces, no escapes for CJK, and no NaN or infinity, which are not JSON."""
    assert canonical({"b": [1, True], "a": "核"}) == '{"a":"核","b":[1,true]}'
    for number in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            canonical({"a": number})


@given(json_objects, json_objects)
def test_differences_are_exactly_the_fields_that_differ(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A field is listed if and only if one side lacks it or its values differ; the two sides mirror each other."""
    missing = object()
    expected = {
        field
        for field in found.keys() | wanted.keys()
        if not same(found.get(field, missing), wanted.get(field, missing))
    }
    told = differences(found, wanted)
    assert told.keys() == expected
    assert (told == {}) is (canonical(found) == canonical(wanted))
    assert all(side == {"found": found.get(field), "wanted": wanted.get(field)} for field, side in told.items())
    assert differences(wanted, found).keys() == expected
    assert all(field in describe(told) for field in told)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [(1, 1.0), (1, True), (0, False), ("1", 1), ("", None), ("e\u0301", "é"), ("a", "a "), ("a", "A"), ([], {})],
)
def test_values_that_only_look_equal_differ(found: Any, wanted: Any) -> None:
    """1, 1.0 and true are three values; nothing is trimmed, folded or normalised before the comparison."""
    assert differences({"x": found}, {"x": wanted}) == {"x": {"found": found, "wanted": wanted}}


def test_a_missing_field_differs_from_null() -> None:
    """A field that one side lacks counts, even where the other side has null."""
    assert differences({}, {"x": None}) == differences({"x": None}, {}) == {"x": {"found": None, "wanted": None}}


# -- contracts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["dispatches", "model_requests"])
@pytest.mark.parametrize("amount", [0, -1, 1001, "3", 3.0, 3.5, True, None])
def test_a_budget_is_a_whole_number_from_1_to_1000(budget: str, amount: Any) -> None:
    """Nothing is rounded, parsed or taken from a truth value."""
    with pytest.raises(UsageError, match=budget):
        Budget(**{budget: amount})
    assert Budget(**{budget: 1}) != Budget(**{budget: 1000})


@pytest.mark.parametrize(
    "change",
    [{"approved": True}, {"provider": 1}, {"budget": None}, {"goal": [1]}, {"tool": None}, {"deadline": "tomorrow"}],
    ids=lambda change: next(iter(change)),
)
def test_a_contract_takes_no_unknown_field_and_no_other_type(change: dict[str, Any]) -> None:
    """A contract has exactly its fields, each of exactly its type."""
    contract()
    with pytest.raises((UsageError, TypeError), match=next(iter(change))):
        contract(**change)


def test_a_contract_cannot_be_changed_once_it_is_made() -> None:
    """Contract, budget and tool are frozen."""
    made = contract()
    for part, field in ((made, "provider"), (made.budget, "dispatches"), (made.tool, "fences")):
        with pytest.raises(FrozenInstanceError):
            setattr(part, field, getattr(part, field))


def test_a_contract_is_the_same_after_its_way_through_the_store() -> None:
    """Canonical JSON and back gives an equal contract, so a stored run stands for what was asked."""
    made = contract(goal={"a": [1, 1.5, None, {"b": "核"}]}, deadline=1.5, budget=Budget(dispatches=7))
    assert Contract.of(json.loads(canonical(made.plain()))) == made


def test_every_part_of_a_contract_has_a_name_for_comparison() -> None:
    """`fields` names each inner value by a dotted path, and one change shows under exactly one name."""
    fields = contract().fields()
    changed = {
        "goal.title": {"goal": GOAL | {"title": "another"}},
        "tool.fences": {"tool": replace(ticket_lab.TOOL, fences=False)},
        "provider": {"provider": "anthropic"},
        "model": {"model": "other"},
        "budget.dispatches": {"budget": Budget(dispatches=9)},
        "budget.model_requests": {"budget": Budget(model_requests=9)},
        "deadline": {"deadline": 1.0},
        "command": {"command": "other"},
    }
    assert fields.keys() >= changed.keys()
    for name, change in changed.items():
        assert list(differences(contract(**change).fields(), fields)) == [name]


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), -float("inf")])
def test_a_deadline_is_a_real_moment(deadline: float) -> None:
    """NaN compares as never passed and no JSON can hold it, so it is no deadline."""
    with pytest.raises(UsageError, match="deadline"):
        contract(deadline=deadline)
