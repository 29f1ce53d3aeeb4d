"""A Postgres of the tests' own: started on a folder, stopped at the end, skipped where there is none."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = ["--reuid=65534", "--regid=65534", "--clear-groups"]


@contextmanager
def postgres() -> Iterator[str]:
    """The URL of an empty database; the server refuses to be root, so it is `nobody` then."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install 'miniharness[postgres]')")
    if not (shutil.which("initdb") and shutil.which("postgres")):
        pytest.skip("there is no Postgres on this machine: no initdb, or no postgres, in the PATH")
    root = os.geteuid() == 0
    prefix = ["setpriv", *(NOBODY if root else []), "--pdeathsig", "KILL"]
    with tempfile.TemporaryDirectory(prefix="miniharness-postgres-", ignore_cleanup_errors=True) as folder:
        if root:
            os.chown(folder, 65534, 65534)
        data = str(Path(folder) / "data")
        making = [*prefix, "initdb", "--pgdata", data, "--username", "notes", "--auth", "trust", "--no-sync"]
        subprocess.run(making, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        settings = [
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            "unix_socket_directories=",
            "-c",
            "fsync=off",
            "-p",
            str(port),
        ]
        command = [*prefix, "postgres", "-D", data, *settings]
        with subprocess.Popen(command, cwd=folder, stdin=-3, stdout=-3, stderr=-1, text=True) as server:
            assert server.stderr
            for line in server.stderr:
                if "ready to accept connections" in line:
                    break
            else:
                raise AssertionError(f"Postgres ended with exit code {server.wait()}")
            try:
                yield f"postgresql://notes@127.0.0.1:{port}/postgres"
            finally:
                server.send_signal(signal.SIGQUIT)
