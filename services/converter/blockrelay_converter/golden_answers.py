"""Computes the known answer of every block in a process of the worker, because services do not import each other."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import ExecutionError
from blockrelay.host.child_command import command_lines

_MODULE = "blockrelay_worker.execution.self_test"


def known_answers(
    folder: Path, blocks: Sequence[int], done: Callable[[int], None] = lambda index: None
) -> dict[int, str]:
    """Returns the SHA-256 (hex) of each block's output for a fixed input, by block index.

    `folder` is a block folder, complete but for the answers. `blocks` are indexes of blocks in exact precisions, in
    order. `done` is called with each index as soon as its answer is there. Raises ExecutionError with
    the worker's last line if the worker fails, and for answers that are missing or for other blocks.
    """
    answers: dict[int, str] = {}
    command = [sys.executable, "-m", _MODULE, str(folder), *map(str, blocks)]
    # w4a8 has many small matmuls: threads of NumPy's BLAS wait for each other, which takes ten times as long.
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    what = "the known answers could not be computed"
    with command_lines(command, what, env=env, unusable=ExecutionError) as lines:
        for index, line in zip(blocks, lines, strict=False):
            answer = Fields.parse(line, _MODULE, ExecutionError)
            answers[index] = answer.text(f"block_{index}")
            answer.done()
            done(index)
    if len(answers) != len(blocks):
        raise ExecutionError(f"{what}: only {len(answers)} of {len(blocks)} have come")
    return answers
