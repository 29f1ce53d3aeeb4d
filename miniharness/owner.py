"""Who is alive: one lock file per open journal, held until its process ends, however it ends.

The operating system drops the lock with the process, so a killed owner is known to be dead at once and a frozen one
to be alive. This is only about liveness; safety is the epoch's business.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


class Owner:
    """A held lock file in `folder`; `name` is `<pid>-<random>` and never used twice."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.name = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._path = folder / self.name
        self._file = self._path.open("x")  # closed on exec, so no child keeps it
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Declare this owner gone."""
        with suppress(FileNotFoundError):
            self._path.unlink()
        self._file.close()


def is_alive(folder: Path, name: str) -> bool:
    """Whether the owner of that name still holds its lock. Removes what a dead one left behind."""
    path = folder / name
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who ask do not see each other
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    with suppress(FileNotFoundError):
        path.unlink()
    return False


def pid_of(name: str) -> int:
    """The process id in an owner's name."""
    return int(name.partition("-")[0])
