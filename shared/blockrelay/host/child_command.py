"""Runs commands in child processes, and turns the last line of their stderr into an error.

Services run each other's commands, because they do not import each other.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from blockrelay.errors import BlockrelayError, ExecutionError, UsageError
from blockrelay.exit_codes import PREFIX, UNUSABLE

#: The number of SIGKILL, which `signal` does not have on Windows.
_SIGKILL = 9


def how_it_ended(code: int) -> str:
    """Returns the end of a process as text for people: `by SIGKILL`, `with status 1`.

    `code` is the exit code, or minus the number of the signal that ended the process.
    """
    if code < 0:
        name = signal.Signals(-code).name
        return f"by {name}, as it does when memory is used up" if -code == _SIGKILL else f"by {name}"
    return f"with status {code}"


def last_line(stderr: str | bytes, code: int) -> str:
    """Returns the last line on stderr, without the prefix of our commands; if there is none, how the process ended."""
    text = stderr.decode(errors="replace") if isinstance(stderr, bytes) else stderr
    return text.strip().rpartition("\n")[2].removeprefix(PREFIX) or f"its process has ended {how_it_ended(code)}"


@dataclass(frozen=True, slots=True)
class EndedCommand:
    """A command that has ended."""

    code: int
    """Its exit code; below 0: minus the number of the signal that ended it."""
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line on stderr, as `last_line` returns it."""
        return last_line(self.stderr, self.code)

    def check(
        self,
        what: str,
        *,
        unusable: type[BlockrelayError] = UsageError,
        failed: type[BlockrelayError] = ExecutionError,
    ) -> str:
        """Returns stdout if the exit code is 0.

        Raises `unusable` if the command has refused its input (exit code 2), else `failed`. The message is `what` and
        the last line on stderr.
        """
        if self.code:
            raise (unusable if self.code == UNUSABLE else failed)(f"{what}: {self.last_line}")
        return self.stdout


def module_command(module: str, *arguments: str | Path, python: str = sys.executable) -> list[str]:
    """Returns the command that runs a Python module. -P: nothing in the current folder shadows a module."""
    return [python, "-P", "-m", module, *map(str, arguments)]


def run_command(
    argv: Sequence[str | Path], *, stdin: str | None = None, timeout_s: float | None = None
) -> EndedCommand:
    """Runs a command to its end. Raises OSError if it cannot start, subprocess.TimeoutExpired after `timeout_s`."""
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
    return EndedCommand(done.returncode, done.stdout, done.stderr)


@contextmanager
def command_lines(
    argv: Sequence[str],
    what: str,
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    unusable: type[BlockrelayError] = UsageError,
) -> Iterator[IO[bytes]]:
    """Yields stdout of a running command, and then raises what `EndedCommand.check(what)` raises.

    Writes all of `stdin` before it yields, so the command must read it before it fills the pipe of stdout.
    The caller must read all that the command writes. If the caller raises, the command is killed. Raises OSError if the
    command cannot start.
    """
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # a command that has ended early says why on stderr
                process.stdin.write(stdin)
                process.stdin.close()
            yield process.stdout
        except BaseException:
            process.kill()
            raise
        code = process.wait()
        errors.seek(0)
        EndedCommand(code, "", errors.read().decode(errors="replace")).check(what, unusable=unusable)
