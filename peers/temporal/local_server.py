"""The Temporal development server of one folder. It does not know the workflow."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from temporalio.client import Client

SERVER = Path(sys.prefix) / "bin/temporal"
TUNED = ["--sqlite-pragma", "journal_mode=WAL", "--sqlite-pragma", "synchronous=FULL"]
for queue in ("transfer", "timer", "visibility"):
    TUNED += ["--dynamic-config-value", f"history.{queue}ProcessorMaxPollRPS=5000"]


@asynccontextmanager
async def engine(folder: Path, setting: str) -> AsyncIterator[tuple[Client, int]]:
    """The server of `folder` (or another process's, when it answers): a client of it, and its pid."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "port.txt"
    port = file.read_text() if file.exists() else ""
    lock = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT)
    server, client = None, None
    while client is None:
        if server is None and free(lock):
            port = free_port()
            file.write_text(port)
            server = start_server(folder, setting, port, lock)
        assert server is None or server.poll() is None, "the server has ended"
        client = await answering(port)
    try:
        yield client, server.pid if server else 0
    finally:
        if server:
            server.terminate()
            server.wait()


def free(lock: int) -> bool:
    """Whether no server lives on the folder: it holds the lock, and so does who started it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def start_server(folder: Path, setting: str, port: str, lock: int) -> subprocess.Popen[bytes]:
    """Start the server, which dies with this process and holds the lock while it lives."""
    command = ["setpriv", "--pdeathsig", "KILL", SERVER, "server", "start-dev", "--headless"]
    command += ["--ip", "127.0.0.1", "--port", port, "--db-filename", folder / "temporal.db"]
    command += TUNED if setting == "tuned" else []
    return subprocess.Popen(command, pass_fds=[lock])


async def answering(port: str) -> Client | None:
    """A client of the server on this port, if it answers."""
    try:
        return await Client.connect(f"127.0.0.1:{port}")
    except RuntimeError:
        await asyncio.sleep(0.01)
        return None
