"""Commands in child processes: their output, and an error with the last line of their stderr."""

import sys

import pytest

from blockrelay.errors import BlockrelayError, ExecutionError, OnnxBlocksError, ServiceUnavailable, UsageError
from blockrelay.host.child_command import command_lines, run_command

PRINTS = "import sys\nfor line in sys.stdin: print(line.strip().upper(), flush=True)\n"
COMPLAINS = "import sys; sys.stderr.write('a warning\\nblockrelay: x is missing\\n')"


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_stdout_comes_back() -> None:
    assert run_command(python(PRINTS), stdin="a\nb\n").check("it failed") == "A\nB\n"
    with command_lines(python(PRINTS), "it failed", stdin=b"a\nb\n") as lines:
        assert list(lines) == [b"A\n", b"B\n"]


@pytest.mark.parametrize(
    ("end", "kind", "message"),
    [
        (f"{COMPLAINS}; sys.exit(1)", ExecutionError, "it failed: x is missing"),
        (f"{COMPLAINS}; sys.exit(2)", UsageError, "it failed: x is missing"),
        ("import sys; sys.exit(3)", ExecutionError, "it failed: its process has ended with status 3"),
        ("import os; os.kill(os.getpid(), 15)", ExecutionError, "it failed: its process has ended by SIGTERM"),
    ],
)
def test_the_last_line_of_stderr_is_the_error(end: str, kind: type[BlockrelayError], message: str) -> None:
    with pytest.raises(kind) as whole:
        run_command(python(end)).check("it failed")
    with pytest.raises(kind) as streamed, command_lines(python(end), "it failed", stdin=b"x" * (1 << 20)) as lines:
        assert list(lines) == []
    assert (str(whole.value), str(streamed.value)) == (message, message)


def test_the_caller_chooses_the_kinds_of_error() -> None:
    with pytest.raises(OnnxBlocksError), command_lines(python("exit(2)"), "", unusable=OnnxBlocksError) as lines:
        lines.read()
    with pytest.raises(ServiceUnavailable):
        run_command(python("exit(1)")).check("it failed", failed=ServiceUnavailable)


def test_a_callers_error_ends_the_command() -> None:
    with pytest.raises(KeyError), command_lines(python("import time; print(flush=True); time.sleep(900)"), "") as lines:
        lines.readline()
        raise KeyError
