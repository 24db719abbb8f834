"""The devices to profile: how each is opened, and the bytes of blocks and KV pages on it."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import UsageError
from blockrelay.host.memory import available_bytes
from blockrelay.protocol.plan import Stage
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.loader import CPU_PROVIDER, Executors, executors_for
from blockrelay_worker.execution.onnx.compiled.cache_folder import default_root
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from blockrelay_worker.policy import PROFILE_MEMORY_SHARE, PROFILE_STEP_S

#: How often each block is loaded alone, on a CPU and on a device. On a device each time starts a process.
CPU_LOADS, DEVICE_LOADS = 3, 2
#: Class name of the device if only one is profiled, in planners and in the source form of a profile.
ONE_GPU = "GPU"


@dataclass(frozen=True, slots=True)
class StageBytes:
    """The memory of one device in bytes, and the part that blocks take.

    The arguments of `weights` and `page` are the first and the last block, from 1, both included.
    """

    weights: Callable[[int, int], int]
    """Bytes of the weights of blocks first to last."""
    page: Callable[[int, int], int]
    """Bytes of one KV page of blocks first to last."""
    room: int
    """Bytes that weights and KV pages may take together."""


@dataclass(frozen=True, slots=True)
class Target:
    """A device to profile."""

    name: str
    """The device's class in the profile."""
    folder: BlockFolder
    threads: int
    """Threads of a CPU that computes blocks."""
    device: str | None
    """The device's id; None: our own kernels on the CPU, in this process."""
    ranks: int = 1
    """Processes that share a stage of our own kernels."""

    @property
    def loads(self) -> int:
        """How often each block is loaded, each time by new executors without weights."""
        return CPU_LOADS if self.device is None else DEVICE_LOADS

    @contextmanager
    def opened(self, warm_bytes: int | None = None) -> Iterator[Executors]:
        """Opens executors and closes them at the end. Those of a device have a process of their own, as a worker's do;
        it runs blocks one by one to measure each.

        `warm_bytes` limits the bytes of ONNX sessions in memory at once, for ONNX blocks of other makers (None: no
        limit). Raises UsageError for a device that cannot run this model, DeviceLost or DeviceFailed for one that may
        do so later.
        """
        if self.device is None:
            yield executors_for(self.folder, threads=self.threads, ranks=self.ranks)
            return
        settings = WorkerSettings()
        how = Gpu(
            self.device,
            PROFILE_STEP_S,
            settings.gpu_python or sys.executable,
            per_block=True,
            cache=settings.cache_dir or default_root(os.environ),
            budget_bytes=settings.gpu_memory,
            threads=self.threads,
            quarantine=False,
            warm=(None, warm_bytes, False),
        )
        executors = DeviceExecutors(self.folder, how)
        try:
            yield executors
        finally:
            executors.close()


def targets(folder: BlockFolder, *, threads: int, gpus: Sequence[str], ranks: int = 1) -> list[Target]:
    """The targets for the CPU and for the devices `gpus`: a single one has class GPU, several have their ids as class.

    `gpus` are device ids such as webgpu:0, `threads` are the threads of the CPU, or of each of its `ranks`.
    Raises UsageError for a device that is named twice, and for several ranks of a model of ONNX files.
    """
    if ranks > 1 and folder.model.onnx_blocks is not None:
        raise UsageError("--tensor-parallel is for our CPU kernels: leave it out with ONNX files")
    if twice := [gpu for index, gpu in enumerate(gpus) if gpu in gpus[:index]]:
        raise UsageError(f"--gpu {twice[0]}: named twice")
    # ONNX Runtime runs ONNX blocks of other makers on CPUs too, in a process of its own.
    cpu = Target("CPU", folder, threads, None if folder.model.onnx_blocks is None else CPU_PROVIDER, ranks)
    return [cpu, *(Target(ONE_GPU if len(gpus) == 1 else gpu, folder, threads, gpu) for gpu in gpus)]


def stage_bytes(folder: BlockFolder, executors: Executors) -> StageBytes:
    """The sizes of blocks on the device of these executors, which are open.

    On a CPU, and on a device of unknown memory size, `room` is PROFILE_MEMORY_SHARE of the host's free memory.
    """
    host = int(available_bytes() * PROFILE_MEMORY_SHARE)
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
