"""The README's own commands, typed as written on a copy of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tickets
from forked import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)

pytestmark = pytest.mark.process


def test_the_first_minute_works_as_written(tmp_path: Path) -> None:
    """Both blocks, command by command, end in two succeeded runs, one ticket each, and the demo's contrast."""
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", ".servers", "state-demo", ".*_cache"))
    commands = [line for block in BLOCKS for line in block.splitlines() if not line.startswith("python -m venv")]
    assert len(commands) == 6
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", "\n".join(commands)], cwd=copy, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("state     succeeded") == 2
    assert "stopped: 75" in done.stdout
    assert "attempts  1 of 3" in done.stdout
    assert "= 2 rows for one order" in done.stdout
    assert [op for op, _ in tickets(copy / "state-demo")] == ["review-001:ticket", "crash-001:ticket"]


def test_the_python_example_runs(tmp_path: Path) -> None:
    """The example from Python gives the state, the attempts and the next command."""
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    program = example.replace('Path("state-demo")', f"Path({str(tmp_path)!r})")
    assert program != example
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("succeeded 1 python -m miniharness"), done.stderr
