"""Servers that nobody here wrote, declared as in `examples/servers`; each world is counted by its own means.

The servers are pinned there, and installed once into `SERVERS_VENV`, or `.servers` in the checkout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Lab
from forked import ROOT
from killed_at import PROGRAM

from peers.environment import make

pytestmark = pytest.mark.process

EXAMPLES = ROOT / "examples" / "servers"
PROXY = ROOT / "tests" / "lossy_proxy.py"


def commands(name: str) -> Path:
    """Where the pinned commands of an example are; they are installed if they are not."""
    place, example = Path(os.environ.get("SERVERS_VENV") or ROOT / ".servers") / name, EXAMPLES / name
    if (example / "requirements.txt").exists():
        make(place, example / "requirements.txt")
        return place / "bin"
    if not shutil.which("node"):
        pytest.skip("this machine has no node")
    make(place, example / "package.json")
    return place / "node_modules" / ".bin"


@dataclass(frozen=True)
class Kind:
    """One of the servers.

    `variable` names its world in `.mcp.json`: the file or folder `world`, which `made` makes; `effects` are what the
    write has done there, `one` is the one that is wanted. `unsure` tells whether a write that is not there may still
    come, for all that anybody knows, `settles` whether that has an end.
    """

    tool: str
    variable: str
    world: str
    made: Callable[[Path], object]
    arguments: Callable[[Path], dict[str, Any]]
    effects: Callable[[Path], list[str]]
    one: str
    expect: dict[str, Any] | None = None
    unsure: bool = False
    settles: bool = False


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False).stdout


def _repository(folder: Path) -> None:
    folder.mkdir()
    (folder / "file").write_text("content")
    for words in ("init -q -b main", "config user.name Ann", "config user.email ann@example.org", "add file"):
        _git(folder, *words.split())


def _table(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("create table orders (reference text, amount integer)")


def _rows(path: Path) -> list[str]:
    with sqlite3.connect(path) as database:
        return [f"{reference} {amount}" for reference, amount in database.execute("select * from orders")]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


NOTE = {"name": "A-17", "entityType": "order", "observations": ["paid in two parts"]}
SERVERS = {
    "git": Kind(
        "git_commit",
        "REPOSITORY",
        "repository",
        _repository,
        lambda world: {"repo_path": str(world), "message": 'A-17: it\'s "done"\n\nBy hand.'},
        lambda world: _git(world, "log", "--format=%s").splitlines(),
        'A-17: it\'s "done"',
        unsure=True,
    ),
    "sqlite": Kind(
        "write_query",
        "DATABASE",
        "orders.sqlite",
        _table,
        lambda world: {"query": "insert into orders values ('A-17', 500)"},
        _rows,
        "A-17 500",
        expect={"reference": "A-17", "amount": 500},
        unsure=True,
        settles=True,
    ),
    "todo": Kind(
        "add_todo",
        "TODO_FILE",
        "todo.txt",
        lambda world: world.write_text("Buy milk\n"),
        lambda world: {"text": "Pay order A-17", "priority": "B"},
        lambda world: [re.sub(r"\d+-\d+-\d+ ", "", line) for line in _lines(world) if line != "Buy milk"],
        "(B) Pay order A-17",
        unsure=True,
    ),
    "filesystem": Kind(
        "write_file",
        "FOLDER",
        "folder",
        lambda world: world.mkdir(),
        lambda world: {"path": str(world / "A-17.txt"), "content": "paid\n"},
        lambda world: [f"{path.name}: {path.read_text()}" for path in world.iterdir()],
        "A-17.txt: paid\n",
    ),
    "memory": Kind(
        "create_entities",
        "MEMORY_FILE",
        "memory.jsonl",
        lambda world: None,
        lambda world: {"entities": [NOTE]},
        lambda world: [json.loads(line)["name"] for line in _lines(world)],
        "A-17",
    ),
}


class Place:
    """A world of one of the servers, and a state folder beside it."""

    def __init__(self, name: str, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.kind, self.folder, self.config = SERVERS[name], folder, EXAMPLES / name
        self.tool, self.world = f"{name}.{self.kind.tool}", folder / self.kind.world
        self._env = {"PATH": f"{os.environ['PATH']}{os.pathsep}{commands(name)}", self.kind.variable: str(self.world)}
        self.kind.made(self.world)

    def lose(self, fate: str) -> None:
        """The first answer to the write will be lost, with the effect or before it."""
        config = self.folder / "config"
        shutil.copytree(self.config, config)
        declared = json.loads((config / ".mcp.json").read_text())
        for entry in declared["mcpServers"].values():
            argv = [str(PROXY), fate, self.kind.tool, str(self.folder / "met"), "--", entry["command"]]
            entry |= {"command": sys.executable, "args": argv + entry.get("args", [])}
        (config / ".mcp.json").write_text(json.dumps(declared))
        self.config = config

    def command(self, *program: str) -> subprocess.CompletedProcess[str]:
        """`miniharness call` of the write, always with the same words."""
        words = ["call", self.tool, "--args", json.dumps(self.kind.arguments(self.world)), "--execute"]
        if self.kind.expect:
            words += ["--expect", json.dumps(self.kind.expect)]
        program = program or ("-m", "miniharness")
        return Lab(self.folder / "state").run(
            *words, "--config", str(self.config), "--json", program=program, **self._env
        )

    def call(self) -> dict[str, Any]:
        """The command to its end, and its answer."""
        done = self.command()
        assert done.stdout, done.stderr
        told: dict[str, Any] = json.loads(done.stdout) | {"code": done.returncode}
        return told

    def killed(self, when: str) -> bool:
        """The command, killed at a statement of its own; whether it was."""
        return self.command(PROGRAM, "miniharness", f"kill@{when}").returncode == -signal.SIGKILL

    def later(self) -> None:
        """Let the settling time be over."""
        with sqlite3.connect(self.folder / "state" / "runs.sqlite") as journal:
            journal.execute("update runs set ended_at = ended_at - 3600000")

    @property
    def effects(self) -> list[str]:
        """What the write has done to the world, as often as it has."""
        return self.kind.effects(self.world)


@pytest.mark.parametrize("name", SERVERS)
def test_a_write_to_a_server_that_others_wrote_is_verified(tmp_path: Path, name: str) -> None:
    """Declared as in the example: written once, found, compared; the same command again only tells it."""
    place = Place(name, tmp_path)
    for _ in range(2):
        told = place.call()
        assert (told["state"], told["attempts"], place.effects) == ("succeeded", 1, [place.kind.one]), told


@pytest.mark.parametrize("name", SERVERS)
def test_an_answer_lost_after_the_effect_is_no_second_effect(tmp_path: Path, name: str) -> None:
    """The server is killed with its answer: another one is asked what is there, and that was the only attempt."""
    place = Place(name, tmp_path)
    place.lose("after")
    told = place.call()
    assert (told["state"], told["attempts"], place.effects) == ("succeeded", 1, [place.kind.one]), told


@pytest.mark.parametrize("name", SERVERS)
def test_an_answer_lost_before_the_effect_is_sent_again_only_where_that_is_safe(tmp_path: Path, name: str) -> None:
    """The server is killed with the call: where nobody can tell whether it will still land, a person is asked."""
    place = Place(name, tmp_path)
    place.lose("before")
    told = place.call()
    if place.kind.unsure:
        assert (told["state"], told["code"], told["attempts"], place.effects) == ("reconcile_required", 3, 1, []), told
        assert told["next"]["action"] == ("wait" if place.kind.settles else "settle")
        if place.kind.settles:
            place.later()
        told = place.call()
    if place.kind.unsure and not place.kind.settles:
        assert (told["state"], told["attempts"], place.effects) == ("reconcile_required", 1, []), told
    else:
        assert (told["state"], told["attempts"], place.effects) == ("succeeded", 2, [place.kind.one]), told


def boundaries(name: str, folder: Path) -> list[str]:
    """Just before and just after each commit that the command makes."""
    whole = Place(name, folder / "whole").command(PROGRAM, "miniharness", "kill@0")
    counted = re.search(r"^engine: (\d+) commits$", whole.stderr, re.MULTILINE)
    assert counted, whole.stderr
    return [f"commit#{k}{after}" for k in range(1, int(counted[1]) + 1) for after in ("", "+")]


def survives(place: Place, when: str) -> str:
    """Kill the command, and type it again: one effect, or none and a person is asked; returns how it ended."""
    assert place.killed(when)
    found = place.effects
    assert found in ([], [place.kind.one])
    told = place.call()
    if told["state"] == "reconcile_required":
        assert (place.kind.unsure, told["attempts"], found, place.effects) == (True, 1, [], []), told
        if not place.kind.settles:
            return "reconcile_required"
        place.later()
        told = place.call()
    assert (told["state"], place.effects) == ("succeeded", [place.kind.one]), told
    assert told["attempts"] == 1 or not found
    return f"succeeded after {told['attempts']}"


@pytest.mark.parametrize(
    ("name", "every"),
    [(name, False) for name in ("git", "sqlite", "memory")]  # one that never settles, one that does, one that repeats
    + [pytest.param(name, True, marks=pytest.mark.slow) for name in SERVERS],
)
def test_a_call_killed_at_a_commit_has_one_effect_or_asks_a_person(tmp_path: Path, name: str, every: bool) -> None:
    """SIGKILL just before and just after every commit (the slow ring), or with the intent on disk and nothing sent, and
    with the effect there and its answer not on disk: the same command again never writes a second time."""
    moments = boundaries(name, tmp_path)
    unsent, unanswered = moments[-5], moments[-4]  # the last three commits are intent, answer and verdict
    ends = {when: survives(Place(name, tmp_path / when), when) for when in (moments if every else (unsent, unanswered))}
    kind = SERVERS[name]
    again = "succeeded after 2" if kind.settles or not kind.unsure else "reconcile_required"
    assert ends.pop(unsent) == again
    assert set(ends.values()) == {"succeeded after 1"}
    print(f"{name}: {len(ends) + 1} kills; with the intent on disk and nothing sent: {again}")
