"""What is tried on a tool to see how its writes can be recovered, and what that shows.

Knows no grades: the experiments are judged in `grades.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from miniharness.check import describe, differences
from miniharness.errors import ToolUnavailable, UsageError
from miniharness.tools.bench import Bench, Operation, Running, Seen, Written
from miniharness.tools.grades import Experiment, Property, Shown, shown

REPEAT, KEYED, CONFLICT, LOOK_UP, FENCE = Property
MOMENTS = (0.0, 0.5)  # when a write is cut off after it has left, in parts of the time that a whole one took
NO_PROCESS = "the server is reached over HTTP: it is no process of ours"
NO_LOOK_UP = "there is no look-up"
KILLED = "the probe killed it"

Result = tuple[str, Shown]
"""What an experiment saw, and what that shows: nothing where it was not tried."""


async def probe(bench: Bench) -> list[Experiment]:
    """Try everything on the tool.

    Raises:
        UsageError: the tool or its arguments cannot be used.
        ToolUnavailable: the server cannot be started at all.
    """
    await bench.running()
    done: list[Experiment] = []
    for name, did, experiment in EXPERIMENTS:
        try:
            saw, shows = await experiment(bench, shown(done))
        except ToolUnavailable as error:  # who cannot be asked cannot tell what is there
            if not done:
                raise
            await bench.stop()
            saw, shows = str(error), {LOOK_UP: False} if bench.looks_up else {REPEAT: None}
        done.append(Experiment(name, did, saw, shows))
    return done


async def _write(bench: Bench, so_far: Shown) -> Result:
    server, operation = await bench.running(), bench.fresh()
    before = await server.see(operation, 1)
    written = await server.write(operation, 1)
    after = await server.see(operation, 2)
    if written.fault and not after.there:
        name = bench.target.full_name
        raise UsageError(f"{name} does not take the very first write ({written}); give --args that it takes")
    saw = f"{before}; {written}; {after}"
    if not bench.looks_up:
        return saw, {}
    faults = [] if before.found is None else ["it finds what was never written"]
    if after.found is None:
        faults.append("it does not find what was written")
    elif wrong := differences(after.found["action"], bench.goal(operation)):
        faults.append(describe(wrong))
    return "; ".join([saw, *faults]), {LOOK_UP: not faults and _agree(before, after)}


async def _repeat(bench: Bench, so_far: Shown) -> Result:
    server, operation = await bench.running(), bench.fresh()
    await server.write(operation, 1)
    before = await server.see(operation, 1)
    again = await server.write(operation, 2)
    after = await server.see(operation, 2)
    return f"{before}; again {again}; {after}{_uncounted(after)}", {REPEAT: _added_nothing(before, again, after)}


async def _other_content(bench: Bench, so_far: Shown) -> Result:
    if not (bench.target.declared.key or bench.target.declared.outcome):
        return "the tool takes no key", {}
    if not bench.varied:
        return "no argument may vary", {}
    server, operation = await bench.running(), bench.fresh()
    other = bench.fresh(operation.key)
    await server.write(operation, 1)
    before, elsewhere = await server.see(operation, 1), await server.see(other, 1)
    written = await server.write(other, 2)
    after, there = await server.see(operation, 2), await server.see(other, 2)
    if not before.there:
        return f"the first content is {before}", {KEYED: None, CONFLICT: None}
    counted = before.count is not None
    if (before, elsewhere) == (after, there):
        sure = counted or written.refused or (before.id is not None and written.id == before.id)
        saw = f"{written}; nothing has changed{_uncounted(after)}"
        return saw, {KEYED: True if sure else None, CONFLICT: written.refused}
    more = (after.count or 0) > (before.count or 0) or after.id != before.id or (there.there and not elsewhere.there)
    saw = f"{written}; {'a second effect' if more else 'the first content is overwritten'}{_uncounted(after)}"
    return saw, {KEYED: False if more else counted or None, CONFLICT: False}


async def _late_write(bench: Bench, so_far: Shown) -> Result:
    if not bench.looks_up:
        return NO_LOOK_UP, {}
    server, operation = await bench.running(), bench.fresh()
    before = await server.see(operation, 2)
    late = await server.write(operation, 1)
    after = await server.see(operation, 2)
    saw = f"{before}; the late write was {late}; {after}"
    if after.there:
        return saw, {FENCE: False}
    newer = await server.write(operation, 3)
    last = await server.see(operation, 3)
    return f"{saw}; a newer one was {newer}; {last}", {FENCE: (late.refused and last.there) or None}


# -- what a dead server leaves behind ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recovery:
    """A write whose server ended, what another server shows of it, and what came of sending it again."""

    written: Written
    first: Seen
    again: Written | None  # None: it was not sent again, for it was there and a repeat has a second effect
    last: Seen

    def shows(self, so_far: Shown, looks_up: bool) -> Shown:
        """What it shows. Two effects where none was seen at first are the fault of the repeat, or of the look-up."""
        twice = (self.last.count or 0) > 1
        seen: dict[Property, bool | None] = {}
        if self.again and (self.first.there or (twice and so_far[REPEAT] is not False)):
            seen[REPEAT] = _added_nothing(self.first, self.again, self.last) if self.first.there else False
        if looks_up:
            lost = self.first.found is None and not self.written.fault
            missed = self.last.found is None and not (self.again and self.again.fault)
            late = twice and not self.first.there and so_far[REPEAT] is False
            seen[LOOK_UP] = not (lost or missed or late) and _agree(self.first, self.last)
        return seen

    def __str__(self) -> str:
        again = f"again {self.again}; {self.last}" if self.again else "not sent again"
        return f"{self.written}; {self.first}; {again}"


End = Callable[[Running, Operation], Awaitable[Written]]
"""Sends a write and ends the server around it, or leaves it to be ended in good order."""


async def _recover(bench: Bench, so_far: Shown, end: End) -> Recovery:
    server, operation = await bench.running(), bench.fresh()
    await server.see(operation, 1)
    written = await end(server, operation)
    await bench.stop()
    server = await bench.running()
    first = await server.see(operation, 2)
    harmless = so_far[REPEAT] is not False
    again = await server.write(operation, 2) if harmless or not first.there else None
    return Recovery(written, first, again, await server.see(operation, 3))


def _killed_after(time_s: float) -> End:
    async def end(server: Running, operation: Operation) -> Written:
        return await (await server.strike(operation, 1, time_s, lambda: server.child.kill(KILLED)))

    return end


async def _killed_before(server: Running, operation: Operation) -> Written:
    server.child.freeze()  # so that the request stays unread
    return await _killed_after(0.0)(server, operation)


async def _killed_in_the_end(server: Running, operation: Operation) -> Written:
    written = await server.write(operation, 1)
    server.child.kill(KILLED)
    return written


async def _closed(server: Running, operation: Operation) -> Written:
    return await server.write(operation, 1)


async def _kill(bench: Bench, so_far: Shown) -> Result:
    if not bench.own:
        return NO_PROCESS, {}
    if so_far[REPEAT] is False and not bench.looks_up:
        return f"a repeat has a second effect, and {NO_LOOK_UP}: nothing more can be seen", {}
    times = [part * bench.write_s for part in MOMENTS]
    ends = (_killed_before, *map(_killed_after, times), _killed_in_the_end)
    done = [await _recover(bench, so_far, end) for end in ends]
    first, last = sum(recovery.first.there for recovery in done), sum(recovery.last.there for recovery in done)
    each = [recovery.shows(so_far, bench.looks_up) for recovery in done]
    wrong = [f"; {r}" for r, shows in zip(done, each, strict=True) if False in shows.values() or not r.last.there]
    when = " and ".join(f"{1000 * time_s:.1f}" for time_s in times)
    saw = f"killed before it read the request, {when} ms after that left, and after the answer: "
    saw += f"there {first} of {len(done)} times, and {last} of {len(done)} in the end"
    both = shown([Experiment("", "", "", shows) for shows in each])
    told = {stated: both[stated] for stated in both if any(stated in shows for shows in each)}
    return saw + "".join(wrong) + _uncounted(done[-1].last), told


async def _restart(bench: Bench, so_far: Shown) -> Result:
    if not bench.own:
        return NO_PROCESS, {}
    recovery = await _recover(bench, so_far, _closed)
    return f"{recovery}{_uncounted(recovery.last)}", recovery.shows(so_far, bench.looks_up)


# -- a frozen server ---------------------------------------------------------------------------------------------------


async def _freeze(bench: Bench, so_far: Shown) -> Result:
    if not bench.own:
        return NO_PROCESS, {}
    if not bench.looks_up:
        return NO_LOOK_UP, {}
    frozen = await bench.running()
    async with AsyncExitStack() as stack:
        try:
            second = await stack.enter_async_context(bench.started())
        except ToolUnavailable as error:
            return f"no second server starts beside it: {error}", {FENCE: None}
        before = await _thawed(frozen, second, bench.fresh(), None)
        amid = await _thawed(frozen, second, bench.fresh(), bench.write_s / 2)
    both = (before[1], amid[1])
    fenced = False if False in both else (True in both) or None
    return f"before it read the request: {before[0]}; in the midst of the write: {amid[0]}", {FENCE: fenced}


async def _thawed(
    frozen: Running, second: Running, operation: Operation, after_s: float | None
) -> tuple[str, bool | None]:
    """Freeze a server around a write, look up from a second one, and thaw it: what was seen, and whether it is fenced.

    `after_s` is the time from when the request left; None is before it is read.
    """
    await frozen.see(operation, 1)
    try:
        if after_s is None:
            frozen.child.freeze()
            writing = asyncio.create_task(frozen.write(operation, 1))
        else:
            writing = await frozen.strike(operation, 1, after_s, frozen.child.freeze)
        try:
            meanwhile = await second.see(operation, 2)
        except ToolUnavailable:
            meanwhile = None
    finally:
        frozen.child.thaw()
    written = await writing
    after = await second.see(operation, 2)
    if meanwhile is None:
        return f"the look-up gave no answer meanwhile; {after}", None
    saw = f"{meanwhile}; thawed, the write was {written}; {after}"
    if meanwhile.there:
        return saw, None
    return saw, False if after.there else written.refused or None


EXPERIMENTS: tuple[tuple[str, str, Callable[[Bench, Shown], Awaitable[Result]]], ...] = (
    ("write", "looked up, wrote, looked up", _write),
    ("repeat", "wrote the same twice under one key", _repeat),
    ("other content", "wrote other content under the same key", _other_content),
    ("late write", "looked up, then sent the write of an older epoch", _late_write),
    ("restart", "wrote, restarted the server, looked up, sent it again", _restart),
    ("kill", "killed the server (SIGKILL) around a write, looked up from another, sent it again", _kill),
    ("freeze", "froze the server (SIGSTOP) around a write, looked up from another, thawed it", _freeze),
)
"""Each with its name, what is done, and how. Every one takes operations of its own."""


def _added_nothing(before: Seen, again: Written, after: Seen) -> bool | None:
    """Whether a write that was sent again had no second effect; None where that cannot be seen."""
    if before.found and after.found and before.found != after.found:
        return False
    if before.count is not None and after.count is not None:
        return before.count == after.count if before.count else None
    if before.id is None or after.id is None:
        return None
    return True if again.id == before.id else None


def _agree(*all_seen: Seen) -> bool:
    """Whether the look-up says what was counted."""
    return all(seen.count is None or (seen.found is not None) == (seen.count > 0) for seen in all_seen)


def _uncounted(seen: Seen) -> str:
    return "" if seen.count is not None else "; nothing counts the effects (--count)"
