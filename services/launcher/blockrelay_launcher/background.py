"""Runs `blockrelay up`, or a Redis alone, in the background while another command needs it."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from blockrelay.errors import RedisTrouble, ServiceUnavailable
from blockrelay.host.child_command import module_command
from blockrelay.redis.client import connect
from blockrelay_launcher.policy import REDIS_START_S
from blockrelay_launcher.supervisor import embedded_redis
from blockrelay_launcher.supervisor.child_process import die_with_parent


@contextlib.contextmanager
def running_up(model: Path, stages: int, *options: str, apart: bool = False) -> Iterator[str]:
    """Runs `blockrelay up` in a process of its own, and yields the URL of its gateway when the system is ready.

    It serves the block folder `model` in `stages` stages on a free port; `options` are further arguments of `up`. The
    system ends with the context. With `apart`, Ctrl-C in the terminal reaches only this process, which then ends the
    other one in its own time. Raises ServiceUnavailable if the system ends before it is ready.
    """
    with started_up("--model", str(model), "--stages", str(stages), "--port", "0", *options, apart=apart) as up:
        yield up.urls[0]


class StartedUp(NamedTuple):
    """A ready `blockrelay up` in a process of its own, and the URLs of its gateways."""

    process: "subprocess.Popen[str]"
    urls: list[str]


@contextlib.contextmanager
def started_up(
    *options: str,
    apart: bool,
    python: str = sys.executable,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[StartedUp]:
    """Runs `blockrelay up` with these options under `python`, yields it when it is ready, and ends it with SIGTERM.

    `apart`: as for `running_up`. `log`: file to which its stderr is appended; None: that of this process.
    `environment` is added to that of this process. The thread that enters the context must outlive it, because the
    system ends with this thread. Raises ServiceUnavailable, with the last line of `log`, if it ends before it is ready.
    """
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                module_command("blockrelay_launcher", "up", *options, python=python),
                stdout=subprocess.PIPE,
                stderr=log and stack.enter_context(log.open("ab")),
                text=True,
                env={**os.environ, **(environment or {})},
                start_new_session=apart,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("ready "):
                problem = f"`blockrelay up` ended with code {process.wait()} before it was ready"
                raise ServiceUnavailable(f"{problem}: {log.read_text().strip().splitlines()[-1:]}" if log else problem)
            yield StartedUp(process, line.split()[1:])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


@contextlib.contextmanager
def running_redis(*, durable: bool) -> Iterator[str]:
    """Runs a Redis like the control (`durable`) or payload Redis of `up`, in a temporary folder, and yields its URL.

    Raises ServiceUnavailable if there is no server program, or if the server does not start.
    """
    with tempfile.TemporaryDirectory(prefix="blockrelay-") as root:
        server = embedded_redis.place(embedded_redis.find_server_program(), Path(root) / "redis", durable=durable)
        with subprocess.Popen(server.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                _wait_for(server.url, process)
                yield server.url
            finally:
                process.terminate()
                process.wait()
                embedded_redis.unplace(server)


def _wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + REDIS_START_S
    while True:
        try:
            connect(url).ping()
        except RedisTrouble as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServiceUnavailable(f"a Redis of our own does not start: {error}") from error
            time.sleep(0.05)
        else:
            return
