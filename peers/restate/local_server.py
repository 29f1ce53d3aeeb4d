"""The Restate server of one folder, the service that it calls, and requests to it. It does not know the workflow."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import restate
from hypercorn.asyncio import serve
from hypercorn.config import Config

SERVER = Path(sys.prefix) / "node_modules/@restatedev/restate-server-linux-x64/bin/restate-server"


@contextmanager
def engine(folder: Path, workflow: restate.Workflow) -> Iterator[tuple[int, int]]:
    """The service, and the server of `folder` (or another process's, when it answers): its ingress port and its pid."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "engine.json"
    saved = json.loads(file.read_text()) if file.exists() else {"service": 0, "ports": None}
    listener = listen(saved["service"])
    service, ports, server = listener.getsockname()[1], saved["ports"], None
    start_service(listener, workflow)
    lock = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT)
    while not (ports and ready(ports)):
        if server is None and free(lock):
            ports = dict(zip(["", "INGRESS__", "ADMIN__"], free_ports(3), strict=True))
            file.write_text(json.dumps({"service": service, "ports": ports}))
            server = start_server(folder, ports, lock)
        assert server is None or server.poll() is None, "the server has ended"
        time.sleep(0.01)
    announce(ports["ADMIN__"], service)
    try:
        yield ports["INGRESS__"], server.pid if server else 0
    finally:
        if server:
            server.terminate()
            server.wait()


def call(connection: HTTPConnection, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """One request: the answer's status and JSON."""
    content = None if body is None else json.dumps(body)
    connection.request(method, path, content, {"content-type": "application/json"} if content else {})
    response = connection.getresponse()
    text = response.read()
    return response.status, json.loads(text) if text else None


def connect(port: int, timeout_s: float = 600) -> closing[HTTPConnection]:
    """A connection to one of the server's ports."""
    return closing(HTTPConnection("127.0.0.1", port, timeout=timeout_s))


def ready(ports: dict[str, int]) -> bool:
    """Whether a server answers on its ports."""
    try:
        with connect(ports["ADMIN__"], timeout_s=2) as admin, connect(ports["INGRESS__"], timeout_s=2) as ingress:
            return call(admin, "GET", "/health")[0] == call(ingress, "GET", "/restate/health")[0] == 200
    except (OSError, HTTPException):
        return False


def listen(port: int = 0) -> socket.socket:
    """Listen on this port, or on a free one where it is taken."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return socket.create_server(("127.0.0.1", 0))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as probes:
        return [probes.enter_context(listen()).getsockname()[1] for _ in range(count)]


def free(lock: int) -> bool:
    """Whether no server lives on the folder: it holds the lock, and so does who started it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def start_service(listener: socket.socket, workflow: restate.Workflow) -> None:
    """Serve the workflow from a thread, until this process ends."""
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.h2_max_concurrent_streams = config.keep_alive_max_requests = config.keep_alive_timeout = 2147483647
    service = serve(restate.app(services=[workflow]), config, shutdown_trigger=asyncio.Event().wait)
    threading.Thread(target=asyncio.run, args=(service,), daemon=True).start()


def start_server(folder: Path, ports: dict[str, int], lock: int) -> subprocess.Popen[bytes]:
    """Start the server, which dies with this process and holds the lock while it lives."""
    settings = {f"RESTATE_{name}BIND_ADDRESS": f"127.0.0.1:{port}" for name, port in ports.items()}
    settings |= {"RESTATE_LISTEN_MODE": "tcp", "RESTATE_LOG_FILTER": "warn", "RESTATE_DISABLE_TELEMETRY": "true"}
    command = ["setpriv", "--pdeathsig", "KILL", SERVER, "--no-logo", "--base-dir", folder / "restate-data"]
    return subprocess.Popen(command, env=os.environ | settings, pass_fds=[lock], stdout=sys.stderr)


def announce(admin: int, service: int) -> None:
    """Register the service, or tell the server its new address."""
    uri = f"http://127.0.0.1:{service}/"
    with connect(admin) as connection:
        known = call(connection, "GET", "/deployments")[1]["deployments"]
        if known and known[0]["uri"] == uri:
            return
        method, path = ("PATCH", f"/deployments/{known[0]['id']}") if known else ("POST", "/deployments")
        status, answer = call(connection, method, path, {"uri": uri})
        assert status in {200, 201}, answer


def ask(port: int, method: str, paths: Iterable[str], body: object = None, in_flight: int = 1) -> None:
    """Make these requests, so many at a time, each client over one connection."""
    paths = iter(list(paths))

    def client(_: int) -> None:
        with connect(port) as connection:
            for path in paths:
                status, answer = call(connection, method, path, body)
                assert status in {200, 202}, answer

    with ThreadPoolExecutor(in_flight) as clients:
        list(clients.map(client, range(in_flight)))


def size_bytes(folder: Path) -> int:
    """The size of `folder`, while the server may remove files from it."""
    while True:
        try:
            return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        except FileNotFoundError:
            continue
