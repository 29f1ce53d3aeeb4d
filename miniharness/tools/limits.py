"""What keeps an agent's run from going on for ever: so many calls in all, and none that only repeats the last one.

The count lies beside the journal, so that it survives whoever calls.
"""

from __future__ import annotations

from pathlib import Path

from miniharness.database import Database
from miniharness.errors import Denied
from miniharness.tools.config import Limits

APPLICATION_ID = 0x4D48_4C01  # "MHL" and 1

MIGRATIONS = (
    """
    create table calls (
      run text not null,
      number integer not null,
      call text not null,
      again integer not null,
      failed integer not null default 0,
      primary key (run, number)
    ) strict, without rowid;
    create unique index writes on calls (run, call) where again = -1;
    """,
)
WRITE = -1  # in the place of how often a read was made again


class Counted:
    """The calls of each agent's run.

    Raises:
        StoreError: from any method, when the file cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._db = Database(folder / "calls.sqlite", APPLICATION_ID, MIGRATIONS)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def write(self, run: str, call: str, limits: Limits) -> None:
        """Count a write, once: the same one again is the same operation, which goes on.

        Raises:
            Denied: the run has made all its calls.
        """
        with self._db.transaction():
            known = self._db.execute("select 1 from calls where run = ? and call = ? and again = -1", (run, call))
            if not known.fetchone():
                self._count(run, call, WRITE, limits)

    def read(self, run: str, call: str, limits: Limits) -> None:
        """Count a read. One that failed may be made again, once.

        Raises:
            Denied: the run has made all its calls, or this one just now.
        """
        with self._db.transaction():
            last, again, failed = self._last(run)
            same = last == call
            if same and limits.block_repeats and not (failed and again == 0):
                raise Denied("this very call was just made, and its answer stands; do something else")
            self._count(run, call, again + 1 if same else 0, limits)

    def failed(self, run: str, call: str) -> None:
        """Note that the last read gave no answer."""
        with self._db.transaction():
            self._db.execute(
                "update calls set failed = 1 where run = :run and number ="
                " (select max(number) from calls where run = :run and call = :call)",
                {"run": run, "call": call},
            )

    def _last(self, run: str) -> tuple[str, int, bool]:
        row = self._db.execute(
            "select call, again, failed from calls where run = ? order by number desc limit 1", (run,)
        ).fetchone()
        return (row[0], row[1], bool(row[2])) if row else ("", 0, False)

    def _count(self, run: str, call: str, again: int, limits: Limits) -> None:
        made = self._db.execute("select count(*) from calls where run = ?", (run,)).fetchone()[0]
        if limits.calls_per_run is not None and made >= limits.calls_per_run:
            raise Denied(f"run {run} has made all of its {limits.calls_per_run} calls (limits.calls_per_run)")
        self._db.execute("insert into calls values (?, ?, ?, ?, 0)", (run, made + 1, call, again))
