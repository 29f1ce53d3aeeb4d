"""Golden transcripts: each story's commands, typed as real commands, and everything they recorded, compared as text.

`PYTHONPATH=. python tests/test_stories.py` writes them anew; the difference is then for a person to read.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path

import pytest
from conftest import Lab

from miniharness.report import report
from store import Runs, Tickets

STORIES = sorted((Path(__file__).parent / "stories").glob("*.txt"))

pytestmark = pytest.mark.process


def retell(story: str, lab: Lab) -> str:
    """Type the story's commands again and return its text as it now is."""
    told = [line for line in story.splitlines() if line.startswith("#")]
    seen = 0
    for line in story.splitlines():
        if line.startswith("$ "):
            lines, seen = _type(line[2:], lab, seen)
            told += ["", line, *lines]
    return "\n".join(told) + "\n"


def _type(command: str, lab: Lab, seen: int) -> tuple[list[str], int]:
    program, *args = shlex.split(command)
    if program == "tickets":  # somebody else writes to the ticket system
        lab.state_dir.mkdir()
        other = Tickets(lab.state_dir / "tickets.sqlite")
        other.create(args[0], {"source": args[1], "title": args[2]})
        other.close()
        return [], seen
    done = lab.run(*args) if program == "lab.py" else lab.operate(*args)
    runs = Runs(lab.state_dir)
    now = report(runs, "review-001")
    runs.close()
    new = [f"  {e['seq']:>2} e{e['epoch']} {e['type']}{_detail(e['detail'])}" for e in now["events"][seen:]]
    state = f"{now['state']}" + (f": {now['reason']}" if now["reason"] else "")
    follow = f"next {now['next']['action']}; attempts {now['attempts']}; tickets {len(lab.tickets())}"
    return [f"exit {done.returncode}", *new, state, follow], len(now["events"])


def _detail(detail: dict[str, object]) -> str:
    kept = {k: v for k, v in detail.items() if k not in ("contract", "owner", "metadata", "action_sha256")}
    text = json.dumps(kept, ensure_ascii=False, sort_keys=True) if kept else ""
    return f" {text}" if text else ""


@pytest.mark.parametrize("path", STORIES, ids=lambda p: p.stem)
def test_the_story_is_told_as_before(path: Path, lab: Lab) -> None:
    """The same commands record the same events, reach the same state and name the same next step."""
    assert retell(path.read_text(), lab) == path.read_text()


def test_there_is_a_story_for_each_claim() -> None:
    """The normal two steps, the three faults, conflict, no permit, cancel and a spent budget are all told."""
    assert {path.stem for path in STORIES} == {
        "two_steps", "client_after_intent", "server_after_commit", "client_after_result",
        "conflict", "no_permit", "cancel", "grant", "settle",
    }  # fmt: skip


if __name__ == "__main__":
    for path in STORIES:
        with tempfile.TemporaryDirectory() as scratch:
            path.write_text(retell(path.read_text(), Lab(Path(scratch) / "state")))
