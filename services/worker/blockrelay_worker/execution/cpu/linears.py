"""Linear layers of one block: by our own matmul kernels, by ONNX Runtime (`ort_linear`), or exactly in NumPy.

A w8a8 linear layer is y = float32(int32(u - 128) @ q) * scale, one rounding per step. The integer sum is exact, so
every way to compute it gives the same bits, unless the CPU's instruction saturates: ONNX Runtime's kernels for
uint8 x int8 do on CPUs with AVX2 and no VNNI. Known answers (`self_test`), never CPU flags, decide which variant is
right on a machine:

    both    our own matmul for few rows and u8s8 for many, by measurement (`both_linear`): on CPUs with AMX
    native  our own matmul, with compiled kernels (docs/design-notes.md says how fast)
    u8s8    ONNX Runtime, uint8 rows x int8 weights; right on CPUs with VNNI or AMX
    u8u8    ONNX Runtime, uint8 rows x uint8 weights (plus 128): right everywhere, slower
    exact   NumPy (`exact_linears`), the converter's reference: whole numbers that floats hold exactly

A w4a8 linear layer (`exact_linears.ExactGroupLinear`) uses our kernels in every variant but `exact`, and NumPy where no
compiled kernels are installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.model import FLOATS, float_graph, in_groups
from blockrelay.errors import BlockFolderError, ExecutionError
from blockrelay_worker.execution.cpu.backends.both_linear import BothLinear
from blockrelay_worker.execution.cpu.backends.ort_linear import OrtLinear
from blockrelay_worker.execution.cpu.backends.ort_runtime import shared_runtime
from blockrelay_worker.execution.cpu.exact_linears import ExactGroupLinear, ExactLinear
from blockrelay_worker.execution.ranks.communicator import Communicator
from blockrelay_worker.execution.ranks.shares import Cut
from blockrelay_worker.kernels.interface import Kernels, Linear

Backend = Literal["both", "native", "u8s8", "u8u8", "exact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """What computes blocks: the kernels, the backend of linear layers, and this rank's share."""

    kernels: Kernels
    backend: Backend
    """One that these kernels can serve: `native` and `both` need kernels that multiply."""
    threads: int
    """Threads of ONNX Runtime: the first call in a process sets them for all."""
    cut: Cut
    ranks: Communicator


def load_linear(
    folder: BlockFolder,
    index: int,
    kind: str,
    tensors: Mapping[str, NDArray[Any]],
    by: Computation,
) -> Linear:
    """Makes this rank's columns of the linear layer `kind` (qkv, o, gate_up, down, head) of block `index`.

    fp32 and fp16 ignore the backend: ONNX Runtime computes them, with weights widened to float32. With `both`, our
    matmul serves until both are measured (`both_linear.settle`).

    `tensors` are those of `BlockFolder.tensors(index)`. Raises BlockFolderError if ONNX Runtime refuses the folder's
    graph, ExecutionError if the package onnxruntime has no library that can be used, or if our kernels refuse the
    tensors.
    """
    kernels, backend, own = by.kernels, by.backend, partial(by.cut.own, kind)
    precision = folder.manifest.precision_of(index)
    if in_groups(precision):
        parts = (
            cast(NDArray[np.uint8], own(tensors[f"{kind}.q4"])),
            cast(NDArray[np.float16], own(tensors[f"{kind}.gs"])),
            cast(NDArray[np.float16], own(tensors[f"{kind}.gm"])),
        )
        by_definition = backend == "exact" or not kernels.has_matmul
        return ExactGroupLinear(*parts) if by_definition else kernels.group_matmul(*parts)
    if precision in FLOATS:
        name = float_graph(kind, folder.manifest.precisions)
        return _ort(folder, name, {"w": own(tensors[f"{kind}.w"]).astype(np.float32, copy=False)}, by.threads)
    q = cast(NDArray[np.int8], own(tensors[f"{kind}.q"]))
    scale = cast(NDArray[np.float32], own(tensors[f"{kind}.scale"]))
    if backend == "exact":
        return ExactLinear(q, scale)
    if backend == "native":
        return kernels.matmul(q, scale)
    if backend == "u8u8":
        # Flipping the top bit adds 128 to a two's complement byte.
        return _ort(folder, f"{kind}.u8u8", {"q": q.view(np.uint8) ^ np.uint8(128), "scale": scale}, by.threads)
    linear = _ort(folder, kind, {"q": q, "scale": scale}, by.threads)
    return BothLinear(kernels.matmul(q, scale), linear, shape=q.shape) if backend == "both" else linear


def _ort(folder: BlockFolder, graph: str, weights: Mapping[str, NDArray[Any]], threads: int) -> OrtLinear:
    runtime = shared_runtime(threads)
    try:
        return OrtLinear(folder.graph(graph), weights, runtime=runtime)
    except ExecutionError as error:
        raise BlockFolderError(f"{folder.manifest.graphs[graph]}: ONNX Runtime refuses it: {error}") from error
