"""Absurd (absurd-sdk 0.5.1 on Postgres): a task with one step, worked until it ends.

Followed: https://earendil-works.github.io/absurd/ (quickstart, "Python SDK", "Concepts", "Database Setup"): `absurdctl
init`, a queue, a task spawned under an idempotency key, batches worked by this process. A worker that died is noticed
when its claim runs out: 120 s by default, or `--lease`; then the step runs again, at most 5 attempts in all. There is
no look-up. "Brief overlapping execution is possible: design your steps to tolerate it", so a user avoids a repeated
effect by a step that is idempotent at the other side (here `--variant keyed`).

Postgres is a child of the process that finds none on FOLDER, and dies with it. It refuses to run as root: then it is
`nobody`, with leave to enter folders that only root may.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from absurd_sdk import Absurd, TaskContext

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import world

NOBODY = [
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "--inh-caps=+dac_override",
    "--ambient-caps=+dac_override",
]
PREFIX = ["setpriv", *(NOBODY if os.geteuid() == 0 else []), "--pdeathsig", "KILL"]


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """The address of a Postgres on `folder`, with Absurd's schema; started if there is none, and then stopped."""
    data = folder.resolve() / "postgres"
    if not (data / "PG_VERSION").exists():
        run([*PREFIX, "initdb", "--pgdata", str(data), "--username", "absurd", "--auth", "trust"])
    server = None
    until = time.monotonic() + 60
    while (url := running(data)) is None:
        if time.monotonic() > until:
            raise TimeoutError("Postgres does not start")
        if server is None or server.poll() is not None:  # it exits as long as backends of a killed one are alive
            server = start(data)
        time.sleep(0.05)
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            fresh = connection.execute("select to_regnamespace('absurd') is null").fetchone() == (True,)
        if fresh:
            ctl = str(Path(sys.executable).parent / "absurdctl")
            run([ctl, "init", "-d", url])
            run([ctl, "create-queue", "-d", url, "default"])
        yield url
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)
            server.wait()


def run(command: list[str]) -> None:
    """Run a command to its end; what it says goes to standard error."""
    subprocess.run(command, check=True, stdout=sys.stderr)


def start(data: Path) -> subprocess.Popen[bytes]:
    """A Postgres on a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-p", str(port)]
    return subprocess.Popen([*PREFIX, "postgres", "-D", str(data), *settings], stdout=sys.stderr)


def running(data: Path) -> str | None:
    """The address of the Postgres that runs on `data` and takes connections."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
        if Path(f"/proc/{lines[0]}/cwd").readlink() != data:
            return None
        url = f"postgresql://absurd@127.0.0.1:{lines[3]}/postgres"
        psycopg.connect(url).close()
    except (OSError, IndexError, psycopg.OperationalError):
        return None
    return url


def perform(args: argparse.Namespace, url: str) -> tuple[str, str]:
    """Spawn the task, or find the one that has this key, and work until it has ended."""
    app = Absurd(url)

    @app.register_task(name="insert")
    def insert(params: dict[str, str], ctx: TaskContext) -> str:
        step = ctx.run_step

        @step("effect")
        def done() -> str:
            return world.effect(args.world, params["op"], args.variant, args.accident, args.times)

        return done

    task = app.spawn("insert", {"op": args.op}, idempotency_key=args.op)["task_id"]
    until = time.monotonic() + args.lease + 60
    while (end := app.fetch_task_result(task)) is None or end.state not in ("completed", "failed", "cancelled"):
        if time.monotonic() > until:
            return "unknown", f"task {end.state if end else 'gone'}"
        app.work_batch(claim_timeout=args.lease)
        time.sleep(0.05)
    app.close()
    return ("success" if end.state == "completed" else "failed"), f"task {end.state}: {json.dumps(end.failure)}"


def main() -> None:
    """Run the command and print its verdict."""
    parser = world.parser(__doc__, "effect")
    parser.add_argument("--lease", type=int, default=120, help="claim_timeout, seconds")
    args = parser.parse_args()
    with postgres(args.folder) as url:
        answer = world.verdict(*perform(args, url))
    world.tell(answer)


if __name__ == "__main__":
    main()
