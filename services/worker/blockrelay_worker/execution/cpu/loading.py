"""Loads stages on a CPU, with the fastest variant of linear layers that gives the known answers there."""

import logging
from collections.abc import Mapping
from typing import ClassVar

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import block_linears, is_exact
from blockrelay.errors import KnownAnswerMismatch
from blockrelay.host.cpu import cpu_name
from blockrelay.host.memory import available_bytes
from blockrelay_worker.execution.cpu.backends.both_linear import NEVER, BothLinear, fits_twice, settle
from blockrelay_worker.execution.cpu.linears import Backend
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.numerics_id import numerics_id
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.self_test import first_mismatch
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.kernels.interface import Kernels
from blockrelay_worker.kernels.libraries import has_tiles

_log = logging.getLogger(__name__)


class CpuExecutors:
    """Factory of executors that use our kernels, and ONNX Runtime where we have none, with `threads` threads.

    Implements `loader.Executors`.
    """

    nondeterministic: ClassVar[bool] = False

    def __init__(self, threads: int) -> None:
        self._threads, self._kernels = threads, load_kernels(threads)

    def numerics_id(self, manifest: Manifest) -> str:
        """Returns the numerics id of every executor of this model on CPUs."""
        return numerics_id(manifest)

    def load(self, folder: BlockFolder, first_block: int, last_block: int, *, pages: int) -> StageExecutor:
        """Loads a verified executor with `pages` KV pages, at least two.

        Raises KnownAnswerMismatch for a block that computes other bits, BlockFolderError for blocks that the folder
        lacks or that cannot be loaded, ExecutionError for a block that cannot be computed here.
        """
        return load_stage(
            folder, first_block, last_block, pages=max(2, pages), threads=self._threads, kernels=self._kernels
        )


def load_stage(
    folder: BlockFolder,
    first_block: int,
    last_block: int,
    *,
    pages: int,
    threads: int,
    kernels: Kernels,
    tiles: bool | None = None,
) -> StageExecutor:
    """Loads an executor with the fastest variant by which every block gives its known answer on this machine.

    `tiles`: True if ONNX Runtime may be faster than our matmul here; None: if the CPU has AMX. `pages` is at least 2,
    for the check. Blocks of precisions that are not exact have no known answers and are not checked.

    Raises KnownAnswerMismatch naming the block and the CPU, and BlockFolderError for blocks that the folder lacks or
    that cannot be loaded. Raises ExecutionError if a checked block cannot be computed, the kernels refuse its tensors,
    or ONNX Runtime is needed and has no usable library.
    """
    wrong: str | None = None
    backends = _backends(folder, first_block, last_block, pages, kernels, has_tiles() if tiles is None else tiles)
    for backend in backends:
        executor = StageExecutor(
            folder, first_block, last_block, pages=pages, threads=threads, kernels=kernels, backend=backend
        )
        wrong = _first_wrong(executor)
        if wrong is None:
            return executor
        if backend != backends[-1]:
            _log.info(
                "linear layers by %s give wrong results on this CPU (%s): trying the next variant", backend, wrong
            )
        executor.close()
    raise KnownAnswerMismatch(
        f"{wrong} of {folder.root} computes other bits on this CPU ({cpu_name()}) with {kernels.isa} kernels than "
        "when it was converted: refusing to serve it; convert the model again, or report this CPU",
        block=str(wrong),
    )


def _backends(
    folder: BlockFolder, first_block: int, last_block: int, pages: int, kernels: Kernels, tiles: bool
) -> list[Backend]:
    """Returns the variants of linear layers to try, fastest first."""
    precisions = folder.manifest.precisions[first_block - 1 : last_block]
    if not any(map(is_exact, precisions)):
        return ["u8s8"]
    if not kernels.has_matmul:
        return ["u8s8", "u8u8"]
    backends: list[Backend] = ["native", "u8s8", "u8u8"]
    if tiles:
        weights = sum(
            depth * columns
            for block, precision in enumerate(precisions, first_block)
            if precision == "w8a8"
            for depth, columns in map(folder.model.linear_shape, block_linears(block, folder.model.blocks))
        )
        kv = layout_of(folder, first_block, last_block).bytes_per_page * pages
        if weights and fits_twice(weights, available_bytes(), kv):
            backends.insert(0, "both")
    return backends


def _first_wrong(executor: StageExecutor) -> str | None:
    """Returns the name of the first block that does not give its known answer, or None.

    Linear layers with two backends are checked with each. If all answers are right, they are measured and settled.
    """
    twice = [linear for linear in executor.linears if isinstance(linear, BothLinear)]
    if not twice:
        return first_mismatch(executor)
    for ort_from in (1, NEVER):  # all by ONNX Runtime, then all by ours
        for linear in twice:
            linear.ort_from = ort_from
        executor.linears_changed()
        wrong = first_mismatch(executor)
        if wrong is not None:
            return wrong
    settled = settle(twice)
    executor.linears_changed()
    executor.details["products"] = f"native, u8s8 {_worded(settled)}"
    _log.info("products: %s", executor.details["products"])
    return None


def _worded(settled: Mapping[tuple[int, int], int]) -> str:
    """Returns, say, "from 128 or never rows": the numbers of rows that `settle` chose, over all shapes."""
    return f"from {' or '.join('never' if n == NEVER else str(n) for n in sorted(set(settled.values())))} rows"
