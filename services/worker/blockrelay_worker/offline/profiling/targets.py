"""The devices that are profiled: how each is opened, and what blocks and KV pages take there."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import UsageError
from blockrelay.host.memory import available_bytes
from blockrelay.protocol.plan import Stage
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.loader import CPU, Executors, Gpu, executors_for
from blockrelay_worker.execution.onnx.compiled.cache_folder import default_root
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.process.executors import DeviceExecutors

#: Share of the free memory that weights and KV pages of the measured blocks may take.
MEMORY_SHARE = 0.5
#: How often each block is loaded alone: on a CPU, and on a device, which begins a process for each time.
CPU_LOADS, DEVICE_LOADS = 3, 2
#: Seconds that a step on a device may take; many rows at the longest context of a large model take long.
STEP_LIMIT_S = 300.0
#: Class of the one device that is named, as planners and the short form of a profile call it.
ONE_GPU = "GPU"


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What consecutive blocks take on one device: bytes of the `weights` and of one KV `page` of blocks first to last,
    and the `room` for both."""

    weights: Callable[[int, int], int]
    page: Callable[[int, int], int]
    room: int


@dataclass(frozen=True, slots=True)
class Target:
    """A device to profile. `name` is its class in the profile; `open` makes its executors and ends them afterwards: of
    ONNX blocks that others made they have sessions for so many bytes at once (None: all of them). Each block is loaded
    `loads` times, each time by executors of its own, which have no weights yet."""

    name: str
    open: Callable[[int | None], AbstractContextManager[Executors]]
    loads: int

    def opened(self, warm_bytes: int | None = None) -> AbstractContextManager[Executors]:
        """Its executors, as of `open`."""
        return self.open(warm_bytes)


def targets(folder: BlockFolder, *, threads: int, gpus: Sequence[str]) -> list[Target]:
    """The CPU, and the devices `gpus`: one alone is the class GPU, several are classes of their own names.

    Raises UsageError for a device that is named twice.
    """
    if twice := [gpu for index, gpu in enumerate(gpus) if gpu in gpus[:index]]:
        raise UsageError(f"--gpu {twice[0]}: named twice")
    if folder.model.onnx_blocks is None:
        cpu = Target("CPU", lambda _: nullcontext(executors_for("cpu", folder, threads=threads)), CPU_LOADS)
    else:  # on CPUs too they are ONNX Runtime's, in a process of its own
        cpu = Target("CPU", lambda warm: _on_device(folder, CPU, threads, warm), DEVICE_LOADS)
    found = [cpu]
    for gpu in gpus:
        name = ONE_GPU if len(gpus) == 1 else gpu
        found.append(Target(name, lambda warm, gpu=gpu: _on_device(folder, gpu, threads, warm), DEVICE_LOADS))
    return found


def stage_bytes(folder: BlockFolder, executors: Executors) -> StageBytes:
    """What blocks take on the device of these executors. A device that does not tell its memory shares the host's."""
    host = int(available_bytes() * MEMORY_SHARE)
    if isinstance(executors, DeviceExecutors):
        memory = executors.memory(folder)
        return StageBytes(
            weights=lambda first, last: memory.weight_bytes(Stage(first=first, last=last)),
            page=lambda first, last: memory.page_bytes(Stage(first=first, last=last)),
            room=host if executors.budget_bytes is None else executors.budget_bytes,
        )
    files, manifest = folder.manifest.files, folder.manifest
    return StageBytes(
        weights=lambda first, last: sum(files[manifest.block(n).file].bytes for n in range(first, last + 1)),
        page=lambda first, last: layout_of(folder, first, last).bytes_per_page,
        room=host,
    )


@contextmanager
def _on_device(folder: BlockFolder, gpu: str, threads: int, warm_bytes: int | None) -> Iterator[Executors]:
    """In a process of its own, as workers have it, which runs blocks one by one so that each is measured; `warm_bytes`
    as of Target."""
    settings = WorkerSettings()
    how = Gpu(
        gpu,
        settings.gpu_python or sys.executable,
        STEP_LIMIT_S,
        per_block=True,
        cache=settings.cache_dir or default_root(os.environ),
        budget_bytes=settings.gpu_memory,
        threads=threads,
        quarantine=False,
        warm=(None, warm_bytes, False),
    )
    executors = executors_for("gpu", folder, threads=threads, gpu=how)
    assert isinstance(executors, DeviceExecutors), "a device that is named has a process of its own"
    try:
        yield executors
    finally:
        executors.close()
