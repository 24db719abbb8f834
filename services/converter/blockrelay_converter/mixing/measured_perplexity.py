"""Measures the perplexity of a block folder in a process of the worker: services do not import each other."""

import sys
from pathlib import Path

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import ExecutionError
from blockrelay.host.child_command import run_command

_MODULE = "blockrelay_worker.offline.evaluate"


def perplexity(folder: Path, text: Path, tokens: int) -> tuple[float, int]:
    """Returns the perplexity on the first `tokens` tokens of the text, and how many of them were scored.

    Raises UsageError or ExecutionError with the worker's last line.
    """
    command = [sys.executable, "-m", _MODULE, "--model", str(folder), "--text", str(text), "--tokens", str(tokens)]
    stdout = run_command([*command, "--json"]).check("the perplexity could not be measured")
    report = Fields.parse(stdout.encode(), _MODULE, ExecutionError)
    return report.number("perplexity"), report.integer("tokens")
