"""Runs a process of the worker or converter that does the work of a command."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

from blockrelay.exit_codes import FAILED, complain
from blockrelay.host.child_command import how_it_ended
from blockrelay_launcher.supervisor.child_process import die_with_parent

Report = TypeVar("Report")


def command_of(module: str, *places: Path, python: Path | None = None, **options: object) -> list[str]:
    """Returns the command line of `module`, run by `python` (None: this one): its options, then `places`.

    `max_position=5` is `--max-position 5` there, and `True` an option without a value; `None` and `False` are none.
    """
    argv = [str(python or sys.executable), "-P", "-m", module]
    for name, value in options.items():
        if value is not None and value is not False:
            argv += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [*argv, "--", *map(str, places)]


def run_worker(
    argv: Sequence[str], read: Callable[[IO[bytes]], Report], *, errors: IO[bytes] | None = None
) -> tuple[Report, int]:
    """Runs a process to its end; returns what `read` makes of its stdout, and its exit code.

    `read` must take all that a pipe does not hold, else the process waits forever; if it raises, the process is killed.
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
        assert process.stdout is not None
        try:
            return read(process.stdout), process.wait()
        finally:
            process.kill()


@contextmanager
def progress_bar(text: str, *amounts: ProgressColumn) -> Iterator[Callable[..., None]]:
    """Shows a bar on stderr if it is a terminal: `text`, the bar, `amounts`. Yields the update of Rich for its task."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *amounts)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield partial(progress.update, progress.add_task(text, total=None))


def code_of_silence(code: int) -> int:
    """Returns the exit code of a command whose process ended with `code` before its work was done.

    The process has printed the cause on stderr; for one that was killed, this function prints a line.
    """
    if code > 0:
        return code
    complain(f"the process that does the work has ended {how_it_ended(code)}")
    return FAILED
