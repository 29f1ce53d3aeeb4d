"""What the tests share: a state folder, the command as a real process, and a look at the world's own database."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from hypothesis import HealthCheck, settings

GOAL = {"source": "source-001", "title": "核验 Agent Harness 资料"}

settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow], deadline=None)  # machines are shared
settings.load_profile("busy")


class Lab:
    """`lab.py` and the operator command on one state folder, run as real processes."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir

    def start(self, *args: str, program: tuple[str, ...] = ("lab.py",), **env: str) -> Forked:
        """Start it and do not wait."""
        return Forked([*program, "--state-dir", str(self.state_dir), *args], os.environ | env)

    def run(self, *args: str, program: tuple[str, ...] = ("lab.py",), **env: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        process = self.start(*args, program=program, **env)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def json(self, *args: str, **env: str) -> dict[str, Any]:
        """Run it with --json; the whole of its standard output must be one object."""
        result: dict[str, Any] = json.loads(self.run("--json", *args, **env).stdout)
        return result

    def operate(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m miniharness`."""
        return self.run(*args, program=("-m", "miniharness"))

    def tickets(self) -> list[tuple[str, dict[str, str]]]:
        """Every ticket of the world, `(op, payload)`, read from the server's own file."""
        return tickets(self.state_dir)


def tickets(state_dir: Path) -> list[tuple[str, dict[str, str]]]:
    """Every ticket in a state folder; none when the server never ran."""
    path = state_dir / "tickets.sqlite"
    if not path.exists():
        return []
    connection = sqlite3.connect(path)
    try:
        if not connection.execute("select 1 from sqlite_schema where name = 'tickets'").fetchone():
            return []
        return [(op, json.loads(payload)) for op, payload in connection.execute("select op, payload from tickets")]
    finally:
        connection.close()


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """The command on an empty state folder."""
    return Lab(tmp_path / "state")
