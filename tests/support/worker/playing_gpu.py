"""A worker of the class gpu that computes by the kernels for CPUs, which no worker of ours may be.

What becomes of its requests is the same as on a GPU, and their tokens are those of CPUs, bit by bit.
"""

import sys
from typing import Any

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.__main__ import main
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.lifecycle import workers


def play_gpus() -> None:
    """From now on workers of this process need no device."""
    workers.gpu_of = _no_device
    workers.executors_for = _on_cpu


def _no_device(*_: Any) -> None:
    return None


def _on_cpu(folder: BlockFolder, *, threads: int, **_: Any) -> CpuExecutors:
    return CpuExecutors(threads)


if __name__ == "__main__":
    play_gpus()
    sys.exit(main())
