"""Which executor runs a stage, by device, folder and precision."""

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import Precision
from blockrelay.errors import UsageError
from blockrelay.protocol.plan import Device
from blockrelay.settings import WorkerSettings
from blockrelay.typed_command import typed
from blockrelay_worker.execution.cpu.imported import ImportedExecutors
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.onnx.compiled.cache_folder import default_root
from blockrelay_worker.execution.process.executors import DeviceExecutors


class Executors(Protocol):
    """One implementation, on this machine, for the devices of one class."""

    device: ClassVar[Device]
    #: Its devices do not compute the same bits twice: what they gave can go on elsewhere, and nobody computes it again.
    varies: ClassVar[bool]

    @staticmethod
    def serves(device: Device, precisions: Collection[Precision]) -> bool:
        """Whether it runs models with blocks of these precisions for workers of this device."""
        ...

    def numerics_id(self, manifest: Manifest) -> str:
        """Of all its executors of this model, known before one is loaded."""
        ...

    def load(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> Executor:
        """An executor of these blocks (numbered from 1, both included) with room for `pages` KV pages, or a few more.

        Every block has given its known answer on this machine, if it has one; on a device that is not a CPU the stage
        has come close to a reference. Raises KnownAnswerMismatch naming the block, or the device and what it gets
        wrong; BlockFolderError for blocks that the folder does not have or that cannot be loaded.
        """
        ...


#: The name of ONNX Runtime's CPU provider among devices.
CPU = "cpu"
#: Default number of warm sessions of a sequential worker on a GPU and on a CPU; fewer where memory is short.
WARM_ON_GPU, WARM_ON_CPU = 5, 3
#: The first that serves is taken.
IMPLEMENTATIONS = (CpuExecutors,)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device such as webgpu:0, the Python that has its packages, how long a step may take there, in seconds, whether
    blocks run one by one, to be measured, where to keep what is compiled for it (None: nowhere), whether no step is
    recorded there, how many workers have a stage each there, within so many bytes, and how many threads of the CPU
    ONNX blocks that others made may use. `quarantine`: it is left alone when it was lost too often. `warm`: so many of
    these blocks are there at once, in so many bytes (None: all), and if that is said no more than its memory has room
    for. A session is made and run in `tries` tries at most."""

    device: str
    python: str
    step_limit_s: float
    per_block: bool = False
    cache: Path | None = None
    eager: bool = False
    budget_bytes: int | None = None
    stages: int = 1
    threads: int = 1
    quarantine: bool = True
    warm: tuple[int | None, int | None, bool] = (None, None, False)
    tries: int = 3


def gpu_of(settings: WorkerSettings, folder: BlockFolder) -> Gpu | None:
    """What workers compute on; None: their own kernels. ONNX blocks that others made need ONNX Runtime on CPUs too,
    unless they have been imported; there it has a process of its own like a GPU, and a CPU that others take from us is
    no broken device. Raises UsageError for settings that do not go together."""
    if settings.device == "gpu" and not settings.gpu:
        raise UsageError(
            "a worker of the class gpu needs its device: --gpu webgpu:0 (BLOCKRELAY_GPU; "
            f"`{typed('devices')}` has them), or --device cpu"
        )
    if settings.device == "cpu" and settings.gpu:
        raise UsageError(f"--device cpu and --gpu {settings.gpu}: a worker on a GPU is of the class gpu")
    graphs = graphs_of(settings)
    if not settings.gpu and settings.imported_model is not None:
        if settings.sequential or folder.model.onnx_blocks is None:
            raise UsageError("imported_model is for CPU workers of ONNX blocks, which are not sequential")
        return None
    if not settings.gpu and folder.model.onnx_blocks is None:
        return None
    return Gpu(
        settings.gpu or CPU,
        (settings.gpu_python if settings.gpu else "") or sys.executable,
        settings.session_timeout_s,
        settings.per_block,
        cache=settings.cache_dir or default_root(os.environ) if graphs.kept else None,
        eager=not graphs.recorded,
        budget_bytes=settings.gpu_memory,
        stages=settings.gpu_stages,
        threads=settings.threads,
        quarantine=bool(settings.gpu),
        warm=_warm(settings, folder),
        tries=settings.max_retry_attempts,
    )


@dataclass(frozen=True, slots=True)
class Graphs:
    """What is compiled for a GPU: whether optimised graphs are `kept` from one start to the next, and decode steps
    `recorded` and repeated."""

    kept: bool
    recorded: bool


def graphs_of(settings: WorkerSettings) -> Graphs:
    """Raises UsageError for settings that contradict each other. Pure."""
    mode, cache = settings.graph_mode, settings.use_graph_cache
    if settings.enforce_eager:
        if mode not in (None, "enforce-eager"):
            raise UsageError(f"enforce_eager and graph_mode {mode} contradict each other: set one of them")
        mode = "enforce-eager"
    elif mode == "enforce-eager" and "enforce_eager" in settings.model_fields_set:
        raise UsageError("graph_mode enforce-eager and enforce_eager false contradict each other: set one of them")
    if mode == "enforce-eager" and cache:
        raise UsageError("enforce-eager and use_graph_cache contradict each other: eager graphs are not kept")
    if mode == "use-graph-cache" and cache is False:
        raise UsageError("graph_mode use-graph-cache and use_graph_cache false contradict each other: set one of them")
    kept = mode in (None, "use-graph-cache") if cache is None else cache
    return Graphs(kept, recorded=mode in (None, "reduce-overhead"))


def _warm(settings: WorkerSettings, folder: BlockFolder) -> tuple[int | None, int | None, bool]:
    """As of Gpu. Raises UsageError for limits that mean nothing."""
    limits = settings.max_warm_sessions, settings.warm_session_bytes
    if not settings.sequential:
        if limits != (None, None):
            raise UsageError("max_warm_sessions and warm_session_bytes are for sequential workers")
        return (*limits, False)
    if folder.model.onnx_blocks is None:
        raise UsageError("sequential is for ONNX blocks as they are: other models are cut into stages")
    if limits != (None, None):
        return (*limits, False)
    return WARM_ON_GPU if settings.gpu else WARM_ON_CPU, None, True


def on_device(folder: BlockFolder, gpu: Gpu) -> DeviceExecutors:
    """Stages of this folder in a process of its own. Raises as DeviceExecutors does."""
    return DeviceExecutors(
        gpu.device,
        folder,
        python=gpu.python,
        limit_s=gpu.step_limit_s,
        per_block=gpu.per_block,
        cache=gpu.cache,
        eager=gpu.eager,
        budget_bytes=gpu.budget_bytes,
        workers=gpu.stages,
        threads=gpu.threads,
        quarantine=gpu.quarantine,
        warm=gpu.warm,
        tries=gpu.tries,
    )


def executors_for(
    device: Device, folder: BlockFolder, *, threads: int, gpu: Gpu | None = None, imported: Path | None = None
) -> Executors:
    """What runs stages of this folder on this machine: in a process of its own on the device `gpu`, if one is named;
    with the block folder `imported` from its ONNX blocks, if one is.

    Raises UsageError where nothing does.
    """
    if gpu is not None:
        return on_device(folder, gpu)
    if imported is not None:
        return ImportedExecutors(threads, folder, imported)
    if folder.model.onnx_blocks is not None:
        raise UsageError(f"ONNX blocks as they are have a process of their own: serve them ({typed('up --blocks')})")
    for implementation in IMPLEMENTATIONS:
        if implementation.serves(device, folder.manifest.precisions):
            return implementation(threads)
    raise UsageError(f"no executor runs {folder.manifest.precision} models on a {device} worker")


def devices_here(folder: BlockFolder) -> tuple[Device, ...]:
    """The classes of devices of this machine that run the folder without a GPU."""
    if folder.model.onnx_blocks is not None:
        return ("cpu",)
    return tuple(
        dict.fromkeys(one.device for one in IMPLEMENTATIONS if one.serves(one.device, folder.manifest.precisions))
    )
