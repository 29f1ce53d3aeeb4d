"""A disk that fails, or a state folder in an odd place: one clear error that changes nothing, or it simply works."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import GOAL, Lab, tickets

from store import Runs

pytestmark = pytest.mark.process
FIXTURES = Path(__file__).with_name("fixtures")
RUN = "review-001"
ONE_TICKET = [(f"{RUN}:ticket", GOAL)]


def mounted(path: Path, *options: str) -> bool:
    """Mount a file system in memory there; false where this user may not."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(("mode=700", *options)), "miniharness-test", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    path = tmp_path / "disk"
    if not mounted(path, "size=256k"):
        pytest.skip("mounting a file system needs privileges")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def stored(lab: Lab) -> Lab:
    """The lab with one finished run in its journal and one ticket in the world."""
    lab.state_dir.mkdir()
    for name in ("runs", "tickets"):
        shutil.copy(FIXTURES / f"{name}-1.sqlite", lab.state_dir / f"{name}.sqlite")
    Runs(lab.state_dir).close()  # as the present version has it
    return lab


def files(folder: Path) -> dict[str, str]:
    """Every database in the folder with the digest of its bytes."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.sqlite*"))}


def refused(lab: Lab, *args: str, code: int = 75) -> str:
    """Run the command; it must fail with this code and one line. Returns the line."""
    ended = lab.run("--execute", *args)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("lab.py: ")
    return ended.stderr


def _sql(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.executescript(statement)


def _page_of(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as file:
        found: int = file.execute("select rootpage from sqlite_schema where name = ?", (table,)).fetchone()[0]
    return found


def _overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def _cut(path: Path, page: int) -> None:
    with path.open("r+b") as file:
        file.truncate((page - 1) * 4096)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no header": (lambda p: _overwrite(p, 0, b"garbage " * 16), "not a SQLite database"),
    "text": (lambda p: p.write_text("see you later\n" * 500), "not a SQLite database"),
    "a broken run page": (lambda p: _overwrite(p, 4096 * (_page_of(p, "runs") - 1), b"\xff" * 4096), "damaged"),
    "a broken event page": (lambda p: _overwrite(p, 4096 * (_page_of(p, "events") - 1), b"\xff" * 4096), "damaged"),
    "cut off": (lambda p: _cut(p, _page_of(p, "events")), "damaged"),
    "a newer version": (lambda p: _sql(p, "pragma user_version = 99"), "newer version"),
    "another program's": (lambda p: _sql(p, "pragma application_id = 7"), "another program"),
    "another program's, unmarked": (
        lambda p: (p.unlink(), _sql(p, "create table t (x); insert into t values (1)")),
        "another program",
    ),
    "a contract that is no JSON": (lambda p: _sql(p, "update runs set contract = '{'"), "damaged"),
    "an event that is no JSON": (lambda p: _sql(p, "update events set detail = '{' where seq = 3"), "damaged"),
    "an event of no known type": (lambda p: _sql(p, "update events set type = 'x' where seq = 3"), "damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_journal_that_cannot_be_used_is_one_clear_error_and_stays_as_it_is(stored: Lab, damage: str) -> None:
    """K15: the command says what is wrong with which file, and neither mends, migrates nor re-creates anything."""
    work, reason = DAMAGE[damage]
    work(stored.state_dir / "runs.sqlite")
    before = files(stored.state_dir)
    said = refused(stored)
    assert reason in said
    assert "runs.sqlite" in said
    assert files(stored.state_dir) == before


@pytest.mark.parametrize("damage", ["a broken run page", "a broken event page", "cut off"])
def test_a_damaged_file_of_an_earlier_version_is_not_migrated(lab: Lab, damage: str) -> None:
    """K15: nothing is written into a file before it was found whole."""
    lab.state_dir.mkdir()
    path = lab.state_dir / "runs.sqlite"
    shutil.copy(FIXTURES / "runs-1.sqlite", path)
    DAMAGE[damage][0](path)
    before = files(lab.state_dir)
    assert "damaged" in refused(lab)
    assert files(lab.state_dir) == before


def test_a_journal_that_another_program_holds_is_an_error_until_it_is_let_go(lab: Lab) -> None:
    """K15: locked means wait and say so, in bounded time; afterwards the same command goes on where it stood."""
    assert lab.run().returncode == 0
    with closing(sqlite3.connect(lab.state_dir / "runs.sqlite", isolation_level=None)) as other:
        other.execute("begin immediate")
        stopped = lab.json("--execute")
        other.execute("rollback")
    assert (stopped["state"], stopped["interrupted"]["error"]) == ("waiting_execution", "StoreError")
    assert "locked" in stopped["interrupted"]["message"]
    assert lab.json("--execute")["state"] == "succeeded"
    assert lab.tickets() == ONE_TICKET


def test_tickets_that_another_program_holds_never_become_a_verdict(lab: Lab) -> None:
    """A look-up that fails on the server's side decides nothing; once the lock is gone the run ends with one ticket."""
    assert lab.run().returncode == 0
    with closing(sqlite3.connect(lab.state_dir / "tickets.sqlite", isolation_level=None)) as other:
        other.execute("begin immediate")
        assert lab.json("--execute")["state"] == "waiting_execution"
        other.execute("rollback")
    assert lab.json("--execute")["state"] == "succeeded"
    assert lab.tickets() == ONE_TICKET


@pytest.mark.parametrize("permit", [(), ("--execute",)], ids=["look", "execute"])
def test_a_read_only_disk_is_one_clear_error(disk: Path, permit: tuple[str, ...]) -> None:
    """K15: what cannot be written is said to be so, and the same command goes on when it can."""
    lab = Lab(disk / "state")
    assert lab.run().returncode == 0
    before = files(lab.state_dir)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    ended = lab.run(*permit)
    assert ended.returncode == 75, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "runs.sqlite" in ended.stderr
    assert files(lab.state_dir) == before
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert lab.json("--execute")["state"] == "succeeded"
    assert tickets(lab.state_dir) == ONE_TICKET


@pytest.mark.parametrize(
    "free_kb", [0, 16, 64, 128, *(pytest.param(kb, marks=pytest.mark.slow) for kb in (4, 32, 48, 96, 160))]
)
def test_a_disk_that_is_full_loses_nothing_and_goes_on_when_there_is_room(disk: Path, free_kb: int) -> None:
    """K15: wherever the room ends, the command stops with a reason; with room again it ends with one ticket."""
    lab, ballast = Lab(disk / "state"), disk / "ballast"
    lab.state_dir.mkdir()
    ballast.write_bytes(bytes((256 - free_kb - 4) << 10 if free_kb else 252 << 10))
    ended = lab.run("--execute")
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 75 or (ended.returncode == 0 and free_kb >= 96), ended.stderr
    ballast.unlink()
    assert lab.json("--execute")["state"] == "succeeded"
    assert tickets(lab.state_dir) == ONE_TICKET
    assert lab.operate("replay", RUN).returncode == 0


# -- where the state folder may be -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a/b/核验 状态", 'it\'s "quoted" $HOME #?%41'])
def test_a_state_folder_of_any_name_works(tmp_path: Path, name: str) -> None:
    """K20: missing parents are made, and the next command that is printed is quoted so that a shell takes it."""
    lab = Lab(tmp_path / name)
    first = lab.json()
    assert first["state"] == "waiting_execution"
    command = first["next"]["command"].replace("python", sys.executable, 1)
    ended = subprocess.run(["sh", "-c", command], cwd=Path(__file__).parent.parent, check=False, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    assert lab.tickets() == ONE_TICKET


def test_a_file_in_the_folders_place_is_refused_and_kept(tmp_path: Path) -> None:
    """K20: a file is no state folder; the command says so and leaves it alone."""
    for lab in (Lab(tmp_path / "file"), Lab(tmp_path / "file" / "below")):
        (tmp_path / "file").write_text("mine")
        assert "cannot be used as a folder" in refused(lab, code=2)
        assert (tmp_path / "file").read_text() == "mine"


def test_a_relative_folder_and_a_symlink_are_the_same_folder(tmp_path: Path) -> None:
    """K20: one journal, whichever way one comes to it."""
    root = Path(__file__).parent.parent
    (tmp_path / "link").symlink_to(tmp_path / "state")
    (tmp_path / "state").mkdir()
    up = Path("../" * (len(root.parts) - 1)) / tmp_path.relative_to("/")
    assert Lab(up / "state").json()["state"] == "waiting_execution"
    assert Lab(tmp_path / "link").json("--execute")["state"] == "succeeded"
    again = Lab(tmp_path / "state").json()
    assert (again["state"], again["attempts"]) == ("succeeded", 1)
    assert tickets(tmp_path / "state") == ONE_TICKET
    assert list(root.glob("*.sqlite*")) == []


def test_a_folder_that_hangs_in_the_air_is_refused(tmp_path: Path) -> None:
    """K20: a symlink to nowhere and a folder without permission to make it are one line, not a traceback."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "state")
    assert "cannot be used as a folder" in refused(Lab(tmp_path / "link"), code=2)
    assert "cannot be used as a folder" in refused(Lab(Path("/proc/miniharness")), code=2)


def test_another_file_system_works() -> None:
    """K20: nothing has to be on the disk of the program or of the temporary files."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("there is no file system in memory")
    with TemporaryDirectory(dir=memory) as folder:
        lab = Lab(Path(folder) / "state")
        assert lab.json("--execute")["state"] == "succeeded"
        assert lab.tickets() == ONE_TICKET


# -- durability --------------------------------------------------------------------------------------------------------

COMMITS = """
import asyncio, pathlib, sys
from miniharness.contract import Contract, Tool
from miniharness.machine import Event, EventType
from store import Runs
tool = Tool(name="t", resource="r", fences=True, deduplicates=True)
contract = Contract(goal={}, tool=tool, provider="p", model="m", command="c")

async def main(together):
    runs = Runs(pathlib.Path(sys.argv[1]))
    opened = [await runs.open(f"r-{n}", contract) for n in range(together)]
    for _ in range(20):
        opened = await asyncio.gather(*(runs.record(run, Event(EventType.CONNECTED, {})) for run in opened))

asyncio.run(main(int(sys.argv[2])))
"""


def _syncs(folder: Path, together: int) -> int:
    log = folder.with_suffix(".strace")
    command = ["strace", "-f", "-e", "trace=fdatasync,fsync", "-o", str(log), sys.executable, "-c", COMMITS]
    subprocess.run([*command, str(folder), str(together)], cwd=Path(__file__).parent.parent, check=True)
    return log.read_text().count("sync(")


def test_each_commit_is_synced_to_the_disk_and_those_who_are_together_share_one(tmp_path: Path) -> None:
    """Twenty more transitions of a lone run are twenty more syncs, and of eight runs at once no more than that."""
    if not shutil.which("strace"):
        pytest.skip("counting the syncs needs strace")
    alone, together = _syncs(tmp_path / "alone", 1), _syncs(tmp_path / "together", 8)
    assert alone >= 21
    assert 7 <= together - alone < 20  # seven more runs were opened, one by one
