"""Matrix products of one block: our kernels', ONNX Runtime sessions over memory-mapped weights, or exact NumPy.

A w8a8 product is y = float32(int32(u - 128) @ q) * scale, one rounding per step. The integer sum is exact, so every
way to compute it gives the same bits, unless the CPU's instruction saturates: the kernels for uint8 x int8 do on CPUs
with AVX2 and no VNNI. Which variant is right on this machine is found out by known answer (`self_test`), never by
CPU flags:

    native  our own product, where the kernels have one: 1.1 to 1.7 times as fast as u8s8 (docs/design-notes.md)
    u8s8    ONNX Runtime, uint8 rows x int8 weights; right on CPUs with VNNI or AMX
    u8u8    ONNX Runtime, uint8 rows x uint8 weights (plus 128): right everywhere, slower
    exact   NumPy (`exact_linears`): whole numbers that floats hold exactly; needs no ONNX Runtime, converter's truth

The groups of w4a8 (`exact_linears.ExactGroupLinear`) are added by our kernels in every variant but `exact`; without
compiled kernels NumPy does it.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, cast

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.model import FLOATS, float_graph, in_groups
from blockrelay.errors import BlockFolderError
from blockrelay_worker.execution.cpu.exact_linears import ExactGroupLinear, ExactLinear
from blockrelay_worker.kernels.interface import Kernels, Product

Variant = Literal["native", "u8s8", "u8u8", "exact"]
#: Bindings are kept for row counts up to this one; larger products take so long that making a new one does not show.
_KEPT_BINDINGS = 64


class Linear(Protocol):
    """One matrix product [R, K] -> [R, N]."""

    def __call__(self, rows: NDArray[Any], out: NDArray[np.float32]) -> None:
        """Multiply `rows` (uint8 with zero point 128, or float32; contiguous [R, K], R >= 1) into `out` [R, N]."""
        ...


class OrtLinear:
    """A skeleton graph in a session of its own, with weights that stay where they are mapped."""

    def __init__(self, graph: bytes, weights: Mapping[str, NDArray[Any]], *, threads: int) -> None:
        """`weights` are the graph's initializers by name. ONNX Runtime repacks them; the originals can be paged out."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        # The graph that was hashed is the graph that runs.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        # Every session has its own pool: spinning ones take the cores from whoever works (10x slower steps).
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        self.weight_type = next(iter(weights.values())).dtype
        self._values = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), self._values)
        self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._input = str(self._session.get_inputs()[0].name)
        self._output = str(self._session.get_outputs()[0].name)
        self._bindings: dict[tuple[int, int, int], Any] = {}

    def __call__(self, rows: NDArray[Any], out: NDArray[np.float32]) -> None:
        key = (rows.ctypes.data, out.ctypes.data, rows.shape[0])
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._session.io_binding()
            binding.bind_input(self._input, "cpu", 0, rows.dtype.type, rows.shape, key[0])
            binding.bind_output(self._output, "cpu", 0, np.float32, out.shape, key[1])
            if rows.shape[0] <= _KEPT_BINDINGS:
                self._bindings[key] = binding
        self._session.run_with_iobinding(binding)

    def forget_buffers(self) -> None:
        """Drop what refers to the caller's buffers: they are about to be replaced."""
        self._bindings.clear()


class NativeLinear:
    """A product of the kernels."""

    def __init__(self, product: Product) -> None:
        self._product = product

    def __call__(self, rows: NDArray[Any], out: NDArray[np.float32]) -> None:
        self._product(rows, out)

    def forget_buffers(self) -> None:
        """Nothing to forget."""


def load_linear(
    folder: BlockFolder,
    index: int,
    kind: str,
    tensors: Mapping[str, NDArray[Any]],
    *,
    variant: Variant,
    threads: int,
    kernels: Kernels,
) -> OrtLinear | ExactLinear | ExactGroupLinear | NativeLinear:
    """The product `kind` (qkv, o, gate_up, down, head) of block `index`, which has these tensors.

    `variant` is ignored in fp32 and fp16, whose weights are widened; `native` needs kernels that multiply.

    Raises BlockFolderError if ONNX Runtime refuses the folder's graph.
    """
    precision = folder.manifest.precision_of(index)
    if in_groups(precision):
        parts = (
            cast(NDArray[np.uint8], tensors[f"{kind}.q4"]),
            cast(NDArray[np.float16], tensors[f"{kind}.gs"]),
            cast(NDArray[np.float32], tensors[f"{kind}.scale"]),
        )
        by_definition = variant == "exact" or not kernels.group_multiplies
        return ExactGroupLinear(*parts) if by_definition else NativeLinear(kernels.group_product(*parts))
    if precision in FLOATS:
        name = float_graph(kind, folder.manifest.precisions)
        weights: dict[str, NDArray[Any]] = {"w": tensors[f"{kind}.w"].astype(np.float32, copy=False)}
    else:
        q = cast(NDArray[np.int8], tensors[f"{kind}.q"])
        scale = cast(NDArray[np.float32], tensors[f"{kind}.scale"])
        if variant == "exact":
            return ExactLinear(q, scale)
        if variant == "native":
            return NativeLinear(kernels.product(q, scale))
        if variant == "u8u8":
            # Flipping the top bit adds 128 to a two's complement byte.
            name, weights = f"{kind}.u8u8", {"q": q.view(np.uint8) ^ np.uint8(128), "scale": scale}
        else:
            name, weights = kind, {"q": q, "scale": scale}
    try:
        return OrtLinear(folder.graph(name), weights, threads=threads)
    except Exception as error:  # ONNX Runtime's own exception types have no public common base
        raise BlockFolderError(f"{folder.manifest.graphs[name]}: ONNX Runtime refuses it: {error}") from error
