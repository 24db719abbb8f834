"""Compares imported blocks with the original graphs in a process of the worker: services do not import each other.

An import may be used only after this comparison: only running a graph shows what it computes.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from blockrelay.errors import OnnxBlocksError
from blockrelay.host.child_command import command_lines
from blockrelay.onnx_blocks.reports.codec import decode, encode
from blockrelay.onnx_blocks.reports.importing import ComparedBlock, ComparedPlaces

_COMPARE = "blockrelay_worker.offline.onnx_blocks.comparison.compare"


def compare(
    originals: Path, imported: Path, places: ComparedPlaces, done: Callable[[ComparedBlock], None]
) -> tuple[ComparedBlock, ...]:
    """Compares all blocks and returns the results in order; `done` is called with each good one as it comes.

    `originals` is the folder of ONNX blocks, `imported` the block folder made of it. `places` are the tensors of the
    original graphs that are compared. Raises OnnxBlocksError that names the first block that differs from its
    original, or an original that cannot run; ExecutionError if the worker fails.
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
