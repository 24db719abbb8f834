"""Loads stages on a CPU, with the fastest variant of linear layers that gives the known answers there."""

import logging
from collections.abc import Mapping, Sequence
from typing import ClassVar

from blockrelay.block_folder.folder import BlockFolder, check_blocks
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import Precision, block_linears, is_exact
from blockrelay.errors import KnownAnswerMismatch
from blockrelay.host.cpu import cpu_name
from blockrelay.host.memory import available_bytes
from blockrelay_worker.execution.cpu import resident
from blockrelay_worker.execution.cpu.backends.both_linear import NEVER, BothLinear, fits_twice, settle
from blockrelay_worker.execution.cpu.linears import Backend
from blockrelay_worker.execution.cpu.resident import Form
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.numerics_id import numerics_id
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.self_test import first_mismatch
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.kernels.interface import Kernels
from blockrelay_worker.kernels.libraries import has_tiles

_log = logging.getLogger(__name__)


#: Bytes of memory for each byte of a block's file, where they are not about as many: ONNX Runtime keeps fp16 weights as
#: float32, and again in the order that its products need (75 million parameters: 566 MB for a file of 150 MB).
_MEMORY_FOR_A_BYTE = {"fp16": 4}


def block_bytes(manifest: Manifest, index: int) -> int:
    """Returns the bytes of memory that a block of the model takes on a CPU."""
    return manifest.block_file(index).bytes * _MEMORY_FOR_A_BYTE.get(manifest.precision_of(index), 1)


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
        """Loads a verified executor with `pages` KV pages, at least two. It shares blocks that are loaded already.

        Raises KnownAnswerMismatch for a block that computes other bits, BlockFolderError for blocks that the folder
        lacks or that cannot be loaded, ExecutionError for a block that cannot be computed here.
        """
        return load_stage(
            folder, first_block, last_block, pages=max(2, pages), threads=self._threads, kernels=self._kernels
        )

    def bytes_to_load(self, manifest: Manifest, first_block: int, last_block: int) -> int:
        """Returns the bytes of memory that these blocks take, without those that this process has loaded already."""
        blocks = range(first_block, last_block + 1)
        found = resident.find(manifest, blocks, Form(self._kernels, self._threads, has_tiles()))
        return sum(block_bytes(manifest, index) for index in blocks if index not in found)


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
    for the check. Blocks of precisions that are not exact have no known answers and are not checked. Blocks that this
    process has loaded already (`resident`) are shared; the files of others are compared with the manifest if they were
    not when the folder was opened. Any thread may call it, and waits while another one loads.

    Raises KnownAnswerMismatch naming the block and the CPU, and BlockFolderError for blocks that the folder lacks or
    that cannot be loaded. Raises ExecutionError if a checked block cannot be computed, the kernels refuse its tensors,
    or ONNX Runtime is needed and has no usable library.
    """
    wrong: str | None = None
    form = Form(kernels, threads, has_tiles() if tiles is None else tiles)
    blocks = range(max(1, first_block), min(last_block, folder.model.blocks) + 1)
    with resident.LOADING:
        shared = resident.find(folder.manifest, blocks, form)
        new = [index for index in blocks if index not in shared]
        check_blocks(folder, new)
        kv_bytes = layout_of(folder, first_block, last_block).bytes_per_page * pages
        backends = _backends(folder, new, kv_bytes, kernels, form.tiles)
        for backend in backends:
            executor = StageExecutor(
                folder, first_block, last_block,
                pages=pages, threads=threads, kernels=kernels, backend=backend, shared=shared,
            )  # fmt: skip
            wrong = _first_wrong(executor, new)
            if wrong is None:
                resident.keep(folder.manifest, {index: executor.blocks[index] for index in new}, form)
                if not new:
                    executor.details["products"] = "those of the blocks that were loaded before"
                return executor
            if backend != backends[-1]:
                _log.info(
                    "linear layers by %s give wrong results on this CPU (%s): trying the next variant", backend, wrong
                )
            executor.close()
    raise mismatch(folder, str(wrong), kernels)


def mismatch(folder: BlockFolder, wrong: str, kernels: Kernels) -> KnownAnswerMismatch:
    """Returns the error for a block that does not give its known answer."""
    return KnownAnswerMismatch(
        f"{wrong} of {folder.root} computes other bits on this CPU ({cpu_name()}) with {kernels.isa} kernels than "
        "when it was converted: refusing to serve it; convert the model again, or report this CPU",
        block=wrong,
    )


def _backends(
    folder: BlockFolder, blocks: Sequence[int], kv_bytes: int, kernels: Kernels, tiles: bool
) -> list[Backend]:
    """Returns the variants of linear layers to try for `blocks`, fastest first."""
    precisions: list[Precision] = [folder.manifest.precision_of(index) for index in blocks]
    if not any(map(is_exact, precisions)):
        return ["u8s8"]
    if not kernels.has_matmul:
        return ["u8s8", "u8u8"]
    backends: list[Backend] = ["native", "u8s8", "u8u8"]
    if tiles:
        weights = sum(
            depth * columns
            for block, precision in zip(blocks, precisions, strict=True)
            if precision == "w8a8"
            for depth, columns in map(folder.model.linear_shape, block_linears(block, folder.model.blocks))
        )
        if weights and fits_twice(weights, available_bytes(), kv_bytes):
            backends.insert(0, "both")
    return backends


def _first_wrong(executor: StageExecutor, blocks: Sequence[int]) -> str | None:
    """Returns the name of the first of `blocks` that does not give its known answer, or None.

    Linear layers with two backends are checked with each. If all answers are right, they are measured and settled.
    Other blocks of the executor stay as they are: another one may be using them.
    """
    linears = [linear for index in blocks for linear in executor.blocks[index].linears.values()]
    twice = [linear for linear in linears if isinstance(linear, BothLinear)]
    if not twice:
        return first_mismatch(executor, blocks)
    for ort_from in (1, NEVER):  # all by ONNX Runtime, then all by ours
        for linear in twice:
            linear.ort_from = ort_from
        executor.linears_changed()
        wrong = first_mismatch(executor, blocks)
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
