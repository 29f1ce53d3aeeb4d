"""The shape of the code: imports point down, nothing happens at import, and the house limits hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import ROOT

ROOT_FILES = ("lab", "model", "store", "server")
PACKAGE = sorted((ROOT / "miniharness").rglob("*.py"))
SOURCES = [ROOT / f"{name}.py" for name in ROOT_FILES] + PACKAGE
PURE = ("machine", "contract", "check", "errors")
NO_IO = {"__future__", "collections", "dataclasses", "enum", "typing"}
NO_IO |= {"hashlib", "json", "math", "re", "unicodedata"}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def code_lines(path: Path) -> int:
    """The lines of a file without the blank ones, comments and docstrings."""
    text = path.read_text()
    told = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return sum(1 for number, line in lines if line and not line.startswith("#") and number not in told)


def python(code: str) -> str:
    """What a fresh interpreter prints for `code`."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_imports_point_down(path: Path) -> None:
    """The engine knows no root file, and nobody imports `lab` (`python lab.py` would load it twice)."""
    forbidden = {"lab"} if path.parent == ROOT else set(ROOT_FILES)
    assert not forbidden & set(imports(path))


@pytest.mark.parametrize("name", PURE)
def test_the_core_imports_no_io(name: str) -> None:
    """Machine, contract, check and errors reach nothing outside: they can run and be replayed anywhere."""
    allowed = NO_IO | {f"miniharness.{pure}" for pure in PURE}
    found = set(imports(ROOT / "miniharness" / f"{name}.py"))
    outside = {m for m in found if not any(m == a or m.startswith(a + ".") for a in allowed) and m != "miniharness"}
    assert not outside


def test_only_the_journal_holds_run_sql() -> None:
    """`runs.py` is the only file that names the tables `runs` and `events` in SQL."""
    writers = [
        p.stem
        for p in SOURCES
        if any(
            f"{verb} {t}" in p.read_text()
            for verb in ("from", "into", "update")
            for t in ("runs where", "events where", "runs (", "events values", "runs set")
        )
    ]
    assert writers == ["runs"]


def test_importing_does_nothing() -> None:
    """Importing every module makes no file, reads no environment key and starts no process."""
    modules = [str(p.relative_to(ROOT).with_suffix("")).replace("/", ".") for p in SOURCES if p.stem != "__main__"]
    code = (
        "import sys, os, importlib, subprocess, sqlite3\n"
        "def bad(event, args):\n"
        "    if event in ('sqlite3.connect', 'subprocess.Popen', 'os.mkdir', 'socket.bind', 'socket.connect'):\n"
        "        raise SystemExit(f'{event} {args} at import')\n"
        "sys.addaudithook(bad)\n"
        f"[importlib.import_module(m) for m in {modules!r}]\n"
        "print('nothing')"
    )
    assert python(code) == "nothing\n"


def test_reading_a_finished_run_imports_no_sdk(tmp_path: Path) -> None:
    """A command that only reads a finished run touches neither mcp nor anthropic: they cost half a second each."""
    code = (
        "import sys, asyncio, pathlib, lab\n"
        f"folder = pathlib.Path({str(tmp_path / 's')!r})\n"
        "done = asyncio.run(lab.execute(folder, execute_write=True)) if sys.argv[1:] else None\n"
        "print(lab.main(['--state-dir', str(folder), '--json']))\n"
        "print([m for m in ('mcp', 'mcp_types', 'anthropic', 'httpx2') if m in sys.modules])"
    )
    subprocess.run([sys.executable, "-c", code, "write"], cwd=ROOT, capture_output=True, check=True)
    assert python(code).splitlines()[1:] == ["0", "[]"]


def test_the_server_child_starts_before_the_sdk_is_imported(tmp_path: Path) -> None:
    """The child is already starting when the parent imports the SDK, so that both warm up at once."""
    code = (
        "import sys, asyncio, pathlib, lab, miniharness.mcp.child as child\n"
        "class Seen(child.subprocess.Popen):\n"
        "    def __init__(self, *a, **k): print('mcp' in sys.modules); super().__init__(*a, **k)\n"
        "child.subprocess.Popen = Seen\n"
        f"asyncio.run(lab.execute(pathlib.Path({str(tmp_path / 's')!r})))\n"
        "print('mcp' in sys.modules)"
    )
    assert python(code).splitlines() == ["False", "True"]


def test_the_house_limits_hold() -> None:
    """Short files and functions: the whole can be read in one sitting."""
    lines = {p: len(p.read_text().splitlines()) for p in SOURCES}
    assert sum(n for p, n in lines.items() if p.parent == ROOT) < 900
    kernel = [p for p in PACKAGE if p.parent.name not in ("tools", "server")]  # these two stand on top
    assert sum(code_lines(p) for p in kernel) < 2500
    assert max(lines.values()) < 500
    functions = [
        (f"{path.name}:{node.name}", node.end_lineno - node.lineno + 1)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]
    assert not [(name, length) for name, length in functions if length > 60]
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


def test_the_files_that_the_order_names_are_there() -> None:
    """The fixed names stand at the top level."""
    names = ["lab.py", "model.py", "store.py", "server.py", "requirements.txt", "tests", "VERIFICATION.md"]
    assert not [name for name in names if not (ROOT / name).exists()]
