"""Environments of what is installed beside us and pinned: the other engines, and the servers and clients of the tests.

Each of the other engines has its own in `PEERS_VENV/NAME`, or `.peers/NAME` beside this folder. `python
environment.py PLACE PINS` makes one.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUIETLY = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]


def python_of(name: str) -> Path:
    """The Python of that engine's environment, whether it is there or not."""
    return Path(os.environ.get("PEERS_VENV") or HERE.parent / ".peers") / name / "bin" / "python"


def install(name: str) -> None:
    """Make the environment of that engine if it is not there; see `make`."""
    make(python_of(name).parents[1], HERE / name / "requirements.txt")


def make(place: Path, pins: Path) -> None:
    """Make the environment `place` of what `pins` lists, unless it is there already; who asks meanwhile waits.

    `pins` is a `package.json` for npm, or a `requirements.txt` for pip, whose first lines may take something from npm,
    too (`# npm install --prefix VENV ...`). Other pins than it was made of are installed over it.

    Raises:
        CalledProcessError, OSError: something could not be installed; the next call tries again.
    """
    place.mkdir(parents=True, exist_ok=True)
    made, wanted = place / "made-of.txt", pins.read_text()
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.exists() and made.read_text() == wanted:
            return
        for command in _npm(place, pins) if pins.suffix == ".json" else _pip(place, pins):
            sys.stderr.write(f"{' '.join(command)}\n")
            subprocess.run(command, check=True, stdout=sys.stderr)
        made.write_text(wanted)  # last, so that half of an environment never passes for one


def _npm(place: Path, pins: Path) -> list[list[str]]:
    shutil.copy(pins, place / "package.json")
    return [["npm", "install", "--prefix", str(place), *QUIETLY]]


def _pip(place: Path, pins: Path) -> list[list[str]]:
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "--disable-pip-version-check"]
    npm = re.findall(r"^#\s+(npm install .*)$", pins.read_text(), re.MULTILINE)
    return [
        [sys.executable, "-m", "venv", "--without-pip", str(place)],
        [*pip, "install", "--quiet", "-r", str(pins)],
        *([*line.replace("VENV", str(place)).split(), *QUIETLY] for line in npm),
    ]


if __name__ == "__main__":  # PLACE PINS
    make(Path(sys.argv[1]), Path(sys.argv[2]))
