"""Measures the perplexity of a block folder in a process of the worker: services do not import each other."""

import sys
from pathlib import Path

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import ExecutionError
from blockrelay.host.child_command import run_command

_MODULE = "blockrelay_worker.offline.evaluate"


def evaluated(what: str, folder: Path, text: Path, tokens: int, *, against: Path | None = None) -> Fields:
    """Returns the report of `blockrelay evaluate --json` on the first `tokens` tokens of `text`, a UTF-8 file.

    `folder` is a block folder. With `against`, another block folder, the report compares both. Raises UsageError for
    input that the worker refuses, and ExecutionError if it fails. `what` names the measurement in the message,
    without an article (`perplexity`); the message ends with the worker's last line on stderr.
    """
    command = [sys.executable, "-P", "-m", _MODULE, "--json", "--text", str(text), "--tokens", str(tokens)]
    command += ["--model", str(folder), *([] if against is None else ["--against", str(against)])]
    stdout = run_command(command).check(f"the {what} could not be measured")
    return Fields.parse(stdout.encode(), _MODULE, ExecutionError)
