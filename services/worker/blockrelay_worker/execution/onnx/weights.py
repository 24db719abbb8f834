"""What the blocks of a folder multiply with, as floats: the weights of every precision, widened."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.model import GROUP
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.graphs.stage import weight_shapes


def block_weights(folder: BlockFolder, block: int, dtype: FloatType) -> dict[str, NDArray[Any]]:
    """Name -> array of `weight_shapes`, of the type `dtype`. One block in memory at a time."""
    tensors = folder.tensors(block)
    found: dict[str, NDArray[Any]] = {}
    for name, shape in weight_shapes(folder.model, block).items():
        array = tensors[name] if name in tensors else _linear(tensors, name)
        found[name] = np.ascontiguousarray(array.reshape(shape), dtype)
    return found


def _linear(tensors: dict[str, NDArray[Any]], kind: str) -> NDArray[np.float32]:
    """[K, N], as `block_tensors` says what a linear layer multiplies by."""
    if f"{kind}.w" in tensors:
        return tensors[f"{kind}.w"]
    scale: NDArray[np.float32] = tensors[f"{kind}.scale"]
    if f"{kind}.q" in tensors:
        return tensors[f"{kind}.q"].astype(np.float32) * scale
    pairs: NDArray[np.uint8] = tensors[f"{kind}.q4"]
    nibbles = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(2 * pairs.shape[0], pairs.shape[1])
    factors = np.repeat(tensors[f"{kind}.gs"].astype(np.float32), GROUP, axis=0)
    return (nibbles.astype(np.float32) - 8) * factors * scale
