"""Compares imported blocks with the original graphs in a process of the worker: services do not import each other.

An import may be used only after this comparison: only running a graph shows what it computes.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import ExecutionError, OnnxBlocksError
from blockrelay.host.child_command import command_lines, run_command
from blockrelay.onnx_blocks.reports.codec import decode, encode
from blockrelay.onnx_blocks.reports.importing import ComparedBlock, ComparedPlaces

_COMPARE = "blockrelay_worker.offline.onnx_blocks.comparison.compare"
_EVALUATE = "blockrelay_worker.offline.evaluate"


def compare(
    originals: Path, imported: Path, places: ComparedPlaces, done: Callable[[ComparedBlock], None]
) -> tuple[ComparedBlock, ...]:
    """Compares all blocks and returns the results in order; `done` is called with each as it comes.

    Raises OnnxBlocksError that names the first block that differs from its original, or an original that cannot run;
    ExecutionError if the worker fails.
    """
    command = [sys.executable, "-P", "-m", _COMPARE, "--", str(originals), str(imported)]
    compared: list[ComparedBlock] = []
    what, stdin = "the blocks could not be compared", encode(places).encode()
    with command_lines(command, what, stdin=stdin, unusable=OnnxBlocksError) as lines:
        for line in lines:
            compared.append(decode(ComparedBlock, line))
            if compared[-1].problem:
                raise OnnxBlocksError(compared[-1].problem)
            done(compared[-1])
    return tuple(compared)


def evaluated_cost(folder: Path, against: Path, text: Path) -> float:
    """Returns the share by which the perplexity of `folder` is above that of `against`, on 4,096 tokens of the text.

    Raises UsageError for a text that cannot be used, ExecutionError if the worker fails.
    """
    command = [sys.executable, "-P", "-m", _EVALUATE, "--json", "--text", str(text), "--tokens", "4096"]
    command += ["--model", str(folder), "--against", str(against)]
    stdout = run_command(command).check("the cost could not be measured")
    report = Fields.parse(stdout.encode(), _EVALUATE, ExecutionError)
    return report.number("cost")
