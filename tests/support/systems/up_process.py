"""`blockrelay up` as a process, for tests."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blockrelay.errors import RedisTrouble
from blockrelay.redis.client import connect
from blockrelay_launcher.drill.system import children_of, command_line, environment_of
from blockrelay_launcher.supervisor.shared_page_folder import open_page_folder
from tests.support.leaks import ownerless_keys, settled

COMMAND = [sys.executable, "-m", "blockrelay_launcher"]


class UpProcess:
    """A running `up`; `url` is its gateway's, "" where it has none. `data` is where it keeps what was accepted. Waits
    until it is ready."""

    def __init__(self, process: "subprocess.Popen[str]", data: Path | None) -> None:
        self.process, self.data = process, data
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "ready\n" or line.startswith("ready http://127.0.0.1:"), f"not ready but {line!r}"
        self.url = line.partition(" ")[2].partition(" ")[0].strip()

    def children(self) -> dict[int, str]:
        """pid -> command line of every process that it has started and that still runs."""
        return {pid: command_line(pid) for pid in children_of(self.process.pid)}

    def pid_of(self, what: str) -> list[int]:
        """Children whose command line contains `what`, lowest pid first."""
        return sorted(pid for pid, command in self.children().items() if what in command)

    def redis_urls(self) -> list[str]:
        """Of the servers that its services use, as one of these was told."""
        for pid in self.pid_of("-m blockrelay_"):
            told = environment_of(pid)
            names = ("BLOCKRELAY_REDIS_URL", "BLOCKRELAY_PAYLOAD_REDIS_URL")
            return [told[name] for name in names if name in told]
        return []

    def assert_nothing_is_ownerless(self) -> None:
        """No key in its Redis servers belongs to nothing that lives. One that does not answer says nothing."""
        for url in self.redis_urls():
            with connect(url) as client, contextlib.suppress(RedisTrouble):
                left = settled(lambda of=client: ownerless_keys(of))
                assert not left, "\n".join(map(str, left))

    def stop(self, number: int = signal.SIGTERM, *, timeout_s: float = 40) -> int:
        """Send a signal and wait; the exit code."""
        self.assert_nothing_is_ownerless()
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


@contextmanager
def running_up(model: Path | None, *options: str, data: Path | None = None) -> Iterator[UpProcess]:
    """`blockrelay up` on a free port, ready; None: the options say what it serves.

    Ends properly behind a test that has not stopped it, and dies with one that failed.
    """
    served = () if model is None else ("--model", str(model))
    with starting_up(*served, "--port", "0", *options, data=data) as process:
        up = UpProcess(process, data)
        yield up
        if process.poll() is None:
            assert up.stop() == 0


@contextmanager
def starting_up(*options: str, data: Path | None = None) -> "Iterator[subprocess.Popen[str]]":
    """`blockrelay up`, not ready yet; dies behind a test that has not ended it."""
    argv = [*COMMAND, "up", *options]
    if data is not None:
        argv += ["--data", str(data)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ.copy()) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
                with open_page_folder():  # removes that of the dead, which would be one more failure and hide the first
                    pass
