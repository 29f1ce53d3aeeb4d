"""The environment of each of the other engines: `PEERS_VENV/NAME`, or `.peers/NAME` beside this folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def python_of(name: str) -> Path:
    """The Python of that environment, whether it is there or not."""
    return Path(os.environ.get("PEERS_VENV") or HERE.parent / ".peers") / name / "bin" / "python"


def install(name: str) -> None:
    """Make the environment if it is not there: what its requirements pin, and what their first lines take from npm.

    Raises:
        CalledProcessError, OSError: something could not be installed; nothing of it stays.
    """
    python = python_of(name)
    if python.exists():
        return
    place, requirements = python.parents[1], HERE / name / "requirements.txt"
    commands = [
        [sys.executable, "-m", "venv", str(place)],
        [str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)],
    ]
    npm = re.findall(r"^#\s+(npm install .*)$", requirements.read_text(), re.MULTILINE)
    commands += [line.replace("VENV", str(place)).split() for line in npm]
    for command in commands:
        sys.stderr.write(f"{' '.join(command)}\n")
        try:
            subprocess.run(command, check=True, stdout=sys.stderr)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)  # half of an environment must not pass for one
            raise
