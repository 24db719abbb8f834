"""An `up` in the background, for commands that need a whole system for a while."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from blockrelay.errors import ServiceUnavailable
from blockrelay_launcher.supervisor.child_process import die_with_parent


@contextlib.contextmanager
def running_up(model: Path, stages: int, *options: str, apart: bool = False) -> Iterator[str]:
    """`blockrelay up` with these options as a process of its own; yields its URL.

    `apart`: Ctrl-C in the terminal reaches this process only, which ends the other one when it is ready to.
    """
    argv = [sys.executable, "-P", "-m", "blockrelay_launcher", "up", "--model", str(model)]
    process = subprocess.Popen(
        [*argv, "--stages", str(stages), "--port", "0", *options],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=apart,
        preexec_fn=die_with_parent(signal.SIGTERM),
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("ready "):
                raise ServiceUnavailable(f"`blockrelay up` ended with code {process.wait()} before it was ready")
            yield line.split()[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
