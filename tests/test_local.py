"""Functions of the own process as tools: the same promise without a server; the world is a list, or a file."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from forked import ROOT
from killed_at import Killed, mortal
from test_crash import processes, shm

from miniharness.errors import ContractMismatch, ToolUnavailable, UsageError
from miniharness.runs import Runs
from miniharness.tools import approvals
from miniharness.tools.hooks import Hook, Verdict
from miniharness.tools.local import ABSENT, UNKNOWN, Ledger, LocalTool, NotFound, Refused, tool

__all__ = ["shm"]  # a fixture of that file


@dataclass
class Bank:
    """Refunds by key, and what befalls the next call."""

    refunds: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0
    fate: str = ""
    sight: NotFound | None = None

    def find(self, key: str) -> dict[str, Any] | NotFound:
        if self.sight:
            return self.sight
        return next(({**r, "id": n} for n, r in enumerate(self.refunds) if r["key"] == key), ABSENT)

    def pay(self, **refund: Any) -> None:
        self.calls += 1
        fate, self.fate = self.fate, ""
        if fate == "killed":
            raise Killed
        if fate == "refused":
            raise Refused("the order was never paid")
        if fate == "before":
            raise ConnectionError("the line is dead")
        self.refunds.append(refund)
        if fate == "after":
            raise ConnectionError("the line is dead")


@pytest.fixture
def bank() -> Bank:
    return Bank()


@pytest.fixture
def refund(bank: Bank) -> LocalTool:
    @tool(recovery="keyed", lookup=bank.find, resource="refund")
    def refund(order_id: str, amount: Decimal, *, key: str, note: str = "") -> None:
        """Give money back."""
        bank.pay(key=key, order_id=order_id, amount=str(amount), note=note)

    return refund


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path / "state")
    yield made
    made.close()


async def test_a_call_writes_once_and_is_verified(bank: Bank, refund: LocalTool, ledger: Ledger) -> None:
    """An equal call is the same operation, also with its defaults spelled out; another one is another."""
    told = await ledger.call(refund, order_id="A-17", amount=Decimal("5.00"))
    assert (told["state"], told["refund"]["id"], told["next"]["action"]) == ("succeeded", 0, "none")
    again = await ledger.call(refund, amount=Decimal("5.00"), order_id="A-17", note="")
    assert (again["run"], again["attempts"], bank.calls) == (told["run"], 1, 1)
    await ledger.call(refund, order_id="A-18", amount=Decimal("5.00"))
    assert [r["order_id"] for r in bank.refunds] == ["A-17", "A-18"]


@pytest.mark.parametrize(("fate", "calls"), [("before", 2), ("after", 1)])
async def test_a_lost_answer_is_looked_up(bank: Bank, refund: LocalTool, ledger: Ledger, fate: str, calls: int) -> None:
    """An exception says nothing about the effect; a keyed tool that has none is called again under its key."""
    bank.fate = fate
    told = await ledger.call(refund, order_id="A-17", amount=5)
    assert (told["state"], bank.calls, len(bank.refunds)) == ("succeeded", calls, 1)


async def test_without_a_key_an_absent_is_not_final(bank: Bank, ledger: Ledger) -> None:
    """The function may still have an effect that is under way, so it is not called again."""

    def find(order: str) -> Any:
        return bank.find(order)

    @tool(recovery="lookup", lookup=find)
    async def pay(order: str) -> None:
        bank.pay(key=order, order=order)

    bank.fate = "before"
    told = await ledger.call(pay, order="A-17")
    assert (told["state"], told["next"]["action"], bank.calls) == ("reconcile_required", "settle", 1)
    assert "settle" in told["next"]["command"]
    assert (await ledger.call(pay, order="A-17"))["state"] == "reconcile_required"
    assert bank.calls == 1


async def test_refused_is_a_clean_end(bank: Bank, refund: LocalTool, ledger: Ledger) -> None:
    """`Refused` says that nothing happened; with a look-up that agrees, the run has failed."""
    bank.fate = "refused"
    told = await ledger.call(refund, order_id="A-17", amount=5)
    assert (told["state"], bank.refunds) == ("failed", [])
    assert "never paid" in told["reason"]


async def test_a_lookup_that_cannot_tell_now_decides_nothing(bank: Bank, refund: LocalTool, ledger: Ledger) -> None:
    """Nothing is sent before it can; later the same call goes on."""
    bank.sight = UNKNOWN
    told = await ledger.call(refund, order_id="A-17", amount=5)
    assert (told["interrupted"]["error"], bank.calls) == ("ToolUnavailable", 0)
    assert told["next"] == {"action": "resume", "command": "run the program again that made this call"}
    bank.sight = None
    assert (await ledger.call(refund, order_id="A-17", amount=5))["state"] == "succeeded"


async def test_secrets_in_what_a_tool_says_reach_no_history(
    ledger: Ledger, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By value and by shape: in refusals, in the errors of writes, look-ups and reads."""
    monkeypatch.setenv("BANK_PASSWORD", "hunter2hunter2")
    told = ConnectionError("hunter2hunter2 for 4111 1111 1111 1111, Bearer abcdefghijklmnopqrstuv")

    @tool(recovery="manual")
    def pay(order: str) -> None:
        raise told

    @tool(recovery="keyed", lookup=lambda key: (_ for _ in ()).throw(told))
    def refund(order: str, key: str) -> None: ...

    @tool(recovery="read")
    def balance() -> None:
        raise told

    said = [await ledger.call(pay, order="A"), await ledger.call(refund, order="A")]
    said.append({"events": [event.detail for event in ledger._runs.events(said[0]["run"])]})
    with pytest.raises(ToolUnavailable) as failed:
        await ledger.call(balance)
    for text in (*map(json.dumps, said), str(failed.value)):
        assert "[secret] for 4111********1111, Bearer [secret]" in text
        assert "hunter2" not in text


async def test_what_is_there_must_equal_the_goal(bank: Bank, refund: LocalTool, ledger: Ledger) -> None:
    """A key that stands for another amount is no success."""
    key = "order-1.1:refund"
    bank.refunds.append({"key": key, "order_id": "A-17", "amount": "6"})
    assert bank.find(key) != ABSENT
    refund.declared = refund.declared.model_copy(update={"operation": "call"})
    with_run = Ledger(Path(ledger._runs.folder), within="order-1")  # the same folder
    told = await with_run.call(refund, order_id="A-17", amount=5)
    with_run.close()
    assert (told["state"], bank.calls) == ("failed", 0)
    assert "amount" in told["reason"]


async def test_a_manual_tool_ends_with_a_person(ledger: Ledger, bank: Bank) -> None:
    """Without a look-up even a friendly answer is nobody's proof."""

    @tool(recovery="manual")
    def mail(to: str) -> None:
        bank.pay(to=to)

    told = await ledger.call(mail, to="ann")
    assert (told["state"], bank.calls) == ("reconcile_required", 1)
    assert "settle" in told["next"]["command"]
    assert "succeeded" in told["next"]["or"]


async def test_a_function_that_only_reads_is_just_called(ledger: Ledger) -> None:
    """It has no run; what it raises is told."""

    @tool(recovery="read")
    async def balance(account: str) -> dict[str, int]:
        if account == "gone":
            raise KeyError(account)
        return {"cents": 100}

    assert json.loads((await ledger.call(balance, account="a"))["result"]) == {"cents": 100}
    with pytest.raises(ToolUnavailable, match="KeyError"):
        await ledger.call(balance, account="gone")


async def test_a_call_that_takes_too_long_is_unknown(ledger: Ledger) -> None:
    """The answer that never came is not taken for a failure."""
    done: list[str] = []

    @tool(recovery="keyed", lookup=lambda key: {"item": "x"} if done else ABSENT, timeout=0.05)
    async def slow(item: str, key: str) -> None:
        done.append(item)
        await asyncio.sleep(60)

    assert (await ledger.call(slow, item="x"))["state"] == "succeeded"
    assert done == ["x"]


async def test_calls_that_may_not_run_side_by_side_take_turns(tmp_path: Path) -> None:
    """Also between two ledgers; who waits too long is told so, and nothing was sent."""
    under_way, begun, end = [0], asyncio.Event(), asyncio.Event()

    def payment(timeout: float) -> LocalTool:
        @tool(recovery="manual", concurrent=False, timeout=timeout)
        async def pay(order: str) -> None:
            under_way.append(under_way[-1] + 1)
            begun.set()
            await (end.wait() if order == "slow" else asyncio.sleep(0.01))
            under_way.append(under_way[-1] - 1)

        return pay

    patient, hasty = payment(20), payment(0.1)
    async with Ledger(tmp_path / "state") as one, Ledger(tmp_path / "state") as two:
        told = await asyncio.gather(*(ledger.call(patient, order=str(n)) for n, ledger in enumerate([one, two, one])))
        assert [each["attempts"] for each in told] == [1, 1, 1]
        begun.clear()
        slow = asyncio.create_task(one.call(patient, order="slow"))
        await begun.wait()
        late = await two.call(hasty, order="late")
        end.set()
        await slow
    assert (late["interrupted"]["error"], max(under_way)) == ("RunBusy", 1)
    assert "one at a time" in late["interrupted"]["message"]


async def test_a_tool_of_any_name_can_take_turns(tmp_path: Path) -> None:
    """T2: a name that is too long for a file, and one that would lead out of the folder."""
    for name in ("/../../../up", "x" * 300):

        def pay(order: str) -> None: ...

        pay.__name__ = name
        made = tool(recovery="manual", concurrent=False)(pay)
        async with Ledger(tmp_path / "state") as ledger:
            assert (await ledger.call(made, order=name))["attempts"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"state"}


async def test_within_a_run_calls_can_be_counted(bank: Bank, tmp_path: Path) -> None:
    """With `operation = "call"` the n-th call is the n-th operation, also when the program runs again."""

    @tool(recovery="keyed", lookup=bank.find, operation="call", expect={"order": "$args.order"})
    def pay(order: str, key: str) -> None:
        bank.pay(key=key, order=order)

    for _ in range(2):
        async with Ledger(tmp_path / "state", within="job-7") as ledger:
            for _ in range(3):
                assert (await ledger.call(pay, order="A-17"))["state"] == "succeeded"
    assert [r["key"] for r in bank.refunds] == [f"job-7.{n}:resource" for n in (1, 2, 3)]
    async with Ledger(tmp_path / "state", within="job-7") as ledger:
        with pytest.raises(ContractMismatch):
            await ledger.call(pay, order="B-1")
    async with Ledger(tmp_path / "state") as ledger:
        with pytest.raises(UsageError, match="within=RUN"):
            await ledger.call(pay, order="A-17")


def approve(folder: Path, run: str) -> None:
    runs = Runs(folder)
    approvals.approve(runs, runs.require(run), "ann")
    runs.close()


async def test_rules_and_approvals_apply_where_they_are_asked_for(
    bank: Bank, refund: LocalTool, tmp_path: Path
) -> None:
    """With the folder of the rules a call waits for a person like any other."""
    (tmp_path / "harness.toml").write_text('[rules]\ndeny = ["mcp__local__refund(order_id:B-*)"]\n')
    async with Ledger(tmp_path / "state", rules=tmp_path) as ledger:
        told = await ledger.call(refund, order_id="A-17", amount=5)
        assert (told["state"], told["next"]["action"], bank.calls) == ("waiting_execution", "approve", 0)
        assert (await ledger.call(refund, order_id="B-1", amount=5))["interrupted"]["error"] == "Denied"
        approvals.approve(ledger._runs, ledger._runs.require(told["run"]), "ann")
        assert (await ledger.call(refund, order_id="A-17", amount=5))["state"] == "succeeded"


async def test_killed_before_any_statement_an_approval_is_still_there_and_is_used_once(
    bank: Bank, refund: LocalTool, shm: Path
) -> None:
    """T10: before the intent it needs no second yes, after it one for each sending; the money moves once."""
    (shm / "harness.toml").write_text('[rules]\nask = ["mcp__local"]\n')
    kills, again = 0, 0
    for k in itertools.count(0):  # 0: in the function, after the intent and before the effect
        folder, order = shm / str(k), f"A-{k}"

        async def call(folder: Path = folder, order: str = order, moment: int = 0) -> Mapping[str, Any]:
            watch = mortal(moment)
            with processes(watch, mortal(0)):
                ledger = Ledger(folder, rules=shm)
                try:
                    return await ledger.call(refund, order_id=order, amount=5)
                finally:
                    ledger._runs._owner and ledger._runs._owner._file.close()

        run = (await call())["run"]
        approve(folder, run)
        bank.fate = "" if k else "killed"
        try:
            told = await call(moment=k)
        except Killed:
            kills += 1
            told = await call()
        if told["state"] == "waiting_execution":  # the intent was on disk, and the money had not moved
            assert (told["attempts"], [r for r in bank.refunds if r["order_id"] == order]) == (1, [])
            again += 1
            approve(folder, run)
            told = await call()
        assert (told["state"], [r["order_id"] for r in bank.refunds].count(order)) == ("succeeded", 1)
        if kills <= k:
            break
    assert kills > 40
    assert again == 1


async def test_a_function_can_be_a_hook(bank: Bank, refund: LocalTool, tmp_path: Path) -> None:
    """It sees the call before and after it, may change or deny it, and hears that the run is over."""
    seen: list[tuple[str, Any]] = []

    async def check(call: Mapping[str, Any]) -> Verdict:
        seen.append((call["hook_event_name"], call.get("tool_name")))
        if call.get("tool_input", {}).get("order_id") == "B-1":
            return Verdict("deny", "not this one")
        return Verdict("none", "", {**call["tool_input"], "note": "seen"})

    hooks = [Hook("PreToolUse", "*", "check", check)]
    hooks += [Hook(event, "mcp__local__refund", "check", check) for event in ("PostToolUse", "Stop")]
    async with Ledger(tmp_path / "state", within="job", hooks=hooks) as ledger:
        assert (await ledger.call(refund, order_id="A-17", amount=5))["state"] == "succeeded"
        denied = await ledger.call(refund, order_id="B-1", amount=5)
    assert (denied["interrupted"]["message"], [r["note"] for r in bank.refunds]) == (
        "local.refund: not this one",
        ["seen"],
    )
    tool_name = "mcp__local__refund"
    assert seen == [("PreToolUse", tool_name), ("PostToolUse", tool_name), ("PreToolUse", tool_name), ("Stop", None)]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"amount": 5}, "order_id: Field required"),
        ({"order_id": "A", "amount": "much"}, "amount"),
        ({"order_id": "A", "amount": 5, "key": "mine"}, "key"),
    ],
)
async def test_arguments_that_do_not_fit_are_named(
    refund: LocalTool, ledger: Ledger, bank: Bank, arguments: dict[str, Any], named: str
) -> None:
    """Nobody but the engine gives the key."""
    with pytest.raises(UsageError, match=named):
        await ledger.call(refund, **arguments)
    assert bank.calls == 0


def test_a_declaration_that_cannot_hold_is_refused_at_once() -> None:
    """A keyed tool needs its key and its look-up, and every parameter an annotation."""
    with pytest.raises(UsageError, match="look_up"):
        tool(recovery="keyed")
    with pytest.raises(UsageError, match="no parameter 'key'"):
        tool(recovery="keyed", lookup=print)(lambda: None)
    with pytest.raises(UsageError, match="outcome is for tools of a server"):
        tool(recovery="keyed", outcome=True)
    with pytest.raises(UsageError, match="annotation"):
        tool(recovery="manual")(lambda amount: None)


def test_it_is_still_a_function(refund: LocalTool, bank: Bank) -> None:
    """Called by itself it runs, and promises nothing."""
    refund("A-17", Decimal(5), key="k")
    assert (bank.calls, refund.__doc__) == (1, "Give money back.")


PROGRAM = """
import asyncio, json, os, signal, sys
from pathlib import Path
from miniharness.tools.hooks import Hook, Verdict
from miniharness.tools.local import ABSENT, Ledger, tool
world, fate = Path("world"), sys.argv[1]

def rows():
    return [json.loads(line) for line in world.read_text().splitlines()] if world.exists() else []

def find(key):
    return next((row for row in rows() if row["key"] == key), ABSENT)

@tool(recovery="keyed", lookup=find)
def refund(order_id: str, amount: int, *, key: str) -> None:
    if fate == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if find(key) is ABSENT:
        with world.open("a") as file:
            file.write(json.dumps({"key": key, "order_id": order_id, "amount": amount}) + "\\n")
    if fate == "after":
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with Ledger(Path("state")) as ledger:
        print((await ledger.call(refund, order_id="A-17", amount=500))["state"])

asyncio.run(main())
"""


@pytest.mark.process
@pytest.mark.parametrize("fates", [("before", ""), ("after", ""), ("before", "after", "")])
def test_a_program_that_is_killed_goes_on_when_it_is_run_again(tmp_path: Path, fates: tuple[str, ...]) -> None:
    """SIGKILL inside the function, before or after its effect: one row in the world."""
    (tmp_path / "refunds.py").write_text(PROGRAM)
    command = [sys.executable, "refunds.py"]
    for fate in fates:
        done = subprocess.run(
            [*command, fate], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
        assert done.returncode == (-signal.SIGKILL if fate else 0), done.stderr
    assert done.stdout == "succeeded\n"
    assert len((tmp_path / "world").read_text().splitlines()) == 1
