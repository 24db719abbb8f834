"""Chooses the executor that runs a stage, by the worker's settings and the block folder."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.errors import UsageError
from blockrelay.protocol.plan import CPU, GPU
from blockrelay.settings import WorkerSettings
from blockrelay.typed_command import typed
from blockrelay_worker.execution.cpu.imported import ImportedExecutors
from blockrelay_worker.execution.cpu.loading import CpuExecutors
from blockrelay_worker.execution.cpu.shared_loading import SharedExecutors
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.onnx.compiled.cache_folder import default_root
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from blockrelay_worker.policy import WARM_ON_CPU, WARM_ON_GPU


class Executors(Protocol):
    """Factory of executors on this machine, for devices of one class."""

    #: Nondeterministic: other workers can continue its output but cannot reproduce its bits.
    nondeterministic: ClassVar[bool]

    def numerics_id(self, manifest: Manifest) -> str:
        """Returns the numerics id of all its executors of this model. None has to be loaded for that."""
        ...

    def load(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> Executor:
        """Loads an executor of these blocks (numbered from 1, both included) with at least `pages` KV pages.

        It is verified: every block with a known answer has given it on this machine; a stage on another device than a
        CPU was compared with a reference. Raises KnownAnswerMismatch naming the block, or the device and its error;
        BlockFolderError for blocks that the folder lacks or that cannot be loaded. On a CPU it raises ExecutionError if
        ONNX Runtime has no usable library, or cannot compute the check. A device in a process of its own also raises
        DeviceLost or DeviceFailed if it cannot load them now, and UsageError for what it will never do.
        """
        ...

    def bytes_to_load(self, manifest: Manifest, first_block: int, last_block: int) -> int:
        """Returns the bytes of the files of these blocks, without those whose weights the next load would share."""
        ...


#: The name of ONNX Runtime's CPU provider among devices.
CPU_PROVIDER = "cpu"


def gpu_of(settings: WorkerSettings, folder: BlockFolder) -> Gpu | None:
    """Returns the options of the process that workers with these settings compute in; None if they use our CPU kernels.

    A model that is served as its own ONNX files needs ONNX Runtime on CPUs too, unless it was imported. ONNX Runtime
    then has a process of its own, like a GPU, but without quarantine: a CPU that other programs use is not broken.
    Raises UsageError for settings that contradict each other or do not fit the folder.
    """
    if settings.device == GPU and not settings.gpu:
        raise UsageError(
            "a worker of the class gpu needs its device: --gpu webgpu:0 (BLOCKRELAY_GPU; "
            f"`{typed('devices')}` has them), or --device cpu"
        )
    if settings.device == CPU and settings.gpu:
        raise UsageError(f"--device cpu and --gpu {settings.gpu}: a worker on a GPU is of the class gpu")
    are_kept, are_recorded = _graphs(settings)
    if not settings.gpu and settings.imported_model is not None:
        if settings.sequential or folder.model.onnx_blocks is None:
            raise UsageError(
                "imported_model is for CPU workers of models of ONNX files, without sequential: leave one out"
            )
        return None
    if not settings.gpu and folder.model.onnx_blocks is None:
        return None
    return Gpu(
        settings.gpu or CPU_PROVIDER,
        settings.session_timeout_s,
        (settings.gpu_python if settings.gpu else "") or sys.executable,
        settings.per_block,
        cache=settings.cache_dir or default_root(os.environ) if are_kept else None,
        eager=not are_recorded,
        budget_bytes=settings.gpu_memory,
        stages=settings.gpu_stages,
        threads=settings.threads,
        quarantine=bool(settings.gpu),
        warm=_warm(settings, folder),
        tries=settings.max_retry_attempts,
    )


def _graphs(settings: WorkerSettings) -> tuple[bool, bool]:
    """Returns whether optimised graphs are kept from one start to the next, and whether decode steps are recorded.

    Raises UsageError for settings that contradict each other.
    """
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
    return kept, mode in (None, "reduce-overhead")


def _warm(settings: WorkerSettings, folder: BlockFolder) -> tuple[int | None, int | None, bool]:
    """Returns `Gpu.warm` for these settings. Raises UsageError for limits that have no effect with them."""
    limits = settings.max_warm_sessions, settings.warm_session_bytes
    if not settings.sequential:
        if limits != (None, None):
            raise UsageError("max_warm_sessions and warm_session_bytes need sequential: set it, or leave them out")
        return (*limits, False)
    if folder.model.onnx_blocks is None:
        raise UsageError(
            "sequential is for models served as ONNX files: leave it out, other models are cut into stages"
        )
    if limits != (None, None):
        return (*limits, False)
    return WARM_ON_GPU if settings.gpu else WARM_ON_CPU, None, True


def executors_for(
    folder: BlockFolder,
    *,
    threads: int,
    gpu: Gpu | None = None,
    imported: Path | None = None,
    ranks: int = 1,
    others: Sequence[BlockFolder] = (),
) -> Executors:
    """Returns the factory of executors for this folder, and `others` of its model, on this machine.

    With `gpu` they run in a process of their own on that device. With `imported`, the block folder that was imported
    from the model's ONNX files, our own kernels compute it. `threads`: CPU threads of our kernels, without `gpu`; of
    each of the `ranks` that share a stage.

    With `gpu` it raises UsageError if the device can never run stages of this folder, and DeviceLost or DeviceFailed
    for what may pass. Without `gpu`, it raises UsageError for a model of ONNX files without `imported`, or with an
    import that does not fit the model. It raises UsageError for several ranks that cannot share stages of these folders
    on this machine, and BlockFolderError for an imported folder that cannot be opened.
    """
    if gpu is not None:
        return DeviceExecutors(folder, gpu)
    if imported is not None:
        return ImportedExecutors(threads, folder, imported)
    if folder.model.onnx_blocks is not None:
        raise UsageError(f"this command does not run models of ONNX files: serve them with `{typed('up --blocks')}`")
    if ranks > 1:
        return SharedExecutors(folder, ranks=ranks, threads=threads, others=others)
    return CpuExecutors(threads)
