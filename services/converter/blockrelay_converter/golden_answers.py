"""Asks the worker what every block computes for the fixed input. Another process: services do not import each other."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import ExecutionError

_MODULE = "blockrelay_worker.execution.self_test"


def known_answers(
    folder: Path, blocks: Sequence[int], done: Callable[[int], None] = lambda index: None
) -> dict[int, str]:
    """Block index -> SHA-256 (hex) of its output, computed from the folder's files alone.

    `blocks` are those of exact precisions, in their order.

    `done` is told each index as it is known. ExecutionError carries the worker's last line if it fails.
    """
    found: dict[int, str] = {}
    command = [sys.executable, "-m", _MODULE, str(folder)]
    # The products of w4a8 are small and many: threads of NumPy's BLAS would wait for each other, ten times as long.
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stderr is not None
        try:
            for index, line in zip(blocks, worker.stdout, strict=False):
                answer = Fields.parse(line, _MODULE, ExecutionError)
                found[index] = answer.text(f"block_{index}")
                answer.done()
                done(index)
            errors = worker.stderr.read().decode(errors="replace").strip().splitlines()
        except BaseException:
            worker.kill()
            raise
    if worker.returncode != 0 or len(found) != len(blocks):
        why = errors[-1] if errors else f"{len(found)} of {len(blocks)}, exit code {worker.returncode}"
        raise ExecutionError(f"the known answers could not be computed: {why}")
    return found
