"""Runs a process of the worker or converter that does the work of a command."""

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

from blockrelay.exit_codes import FAILED, complain
from blockrelay_launcher.supervisor.child_process import die_with_parent


@contextmanager
def worker(argv: Sequence[str], *, errors: IO[bytes] | None = None) -> "Iterator[subprocess.Popen[bytes]]":
    """Starts a process, yields it with its stdout as a pipe, and kills it at the end.

    Its stderr goes to the file `errors`, or by default to that of this process. Ctrl-C reaches only this process, so
    that the other one ends without output; it also ends whenever this process does. Raises OSError if it cannot be
    started.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
        preexec_fn=die_with_parent(signal.SIGKILL),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def progress_bar(text: str, *amounts: ProgressColumn) -> Iterator[Callable[..., None]]:
    """Shows a bar on stderr if it is a terminal: `text`, the bar, `amounts`. Yields the update of Rich for its task."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *amounts)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield partial(progress.update, progress.add_task(text, total=None))


def how_it_ended(code: int) -> str:
    """Returns the end of a process as text for people: `by SIGKILL`, `with status 1`."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"by {name}, as it does when memory is used up" if name == "SIGKILL" else f"by {name}"
    return f"with status {code}"


def code_of_silence(code: int) -> int:
    """Returns the exit code of a command whose process ended with `code` before its work was done.

    The process has printed the cause on stderr; for one that was killed, this function prints a line.
    """
    if code > 0:
        return code
    complain(f"the process that does the work has ended {how_it_ended(code)}")
    return FAILED
