"""The worker's process that a command has do its work."""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from blockrelay.exit_codes import FAILED, complain
from blockrelay_launcher.supervisor.child_process import die_with_parent


@contextmanager
def worker(argv: Sequence[str], *, said: IO[bytes] | None = None) -> "Iterator[subprocess.Popen[bytes]]":
    """The process, its stdout to be read; it is gone behind this. Its stderr goes to the file `said`; None: to ours.
    Ctrl-C reaches this process alone, so that the worker ends in silence; it ends when this process does, however that
    ends. Raises OSError where it cannot be started."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=said,
        start_new_session=True,
        preexec_fn=die_with_parent(signal.SIGKILL),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def how_it_ended(code: int) -> str:
    """For people: `by SIGKILL`, `with status 1`."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"by {name}, as it does when memory is used up" if name == "SIGKILL" else f"by {name}"
    return f"with status {code}"


def code_of_silence(code: int) -> int:
    """The exit code of a command whose worker has ended with `code` before it had done what it was there for. It has
    said why on stderr; here it is said that something killed it."""
    if code > 0:
        return code
    complain(f"the process that does the work has ended {how_it_ended(code)}")
    return FAILED
