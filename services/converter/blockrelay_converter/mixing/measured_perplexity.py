"""Measures the perplexity of a block folder in a process of the worker: services do not import each other."""

import subprocess
import sys
from pathlib import Path

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import ExecutionError, UsageError
from blockrelay.exit_codes import PREFIX, UNUSABLE

_MODULE = "blockrelay_worker.offline.evaluate"


def perplexity(folder: Path, text: Path, tokens: int) -> tuple[float, int]:
    """Returns the perplexity on the first `tokens` tokens of the text, and how many of them were scored.

    Raises UsageError or ExecutionError with the worker's last line.
    """
    command = [sys.executable, "-m", _MODULE, "--model", str(folder), "--text", str(text), "--tokens", str(tokens)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        kind = UsageError if done.returncode == UNUSABLE else ExecutionError
        raise kind(f"the perplexity could not be measured: {lines[-1].removeprefix(PREFIX)}")
    report = Fields.parse(done.stdout.encode(), _MODULE, ExecutionError)
    return report.number("perplexity"), report.integer("tokens")
