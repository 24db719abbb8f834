"""The weights of a folder's blocks as arrays for a device: floats, to which all precisions can be widened, or small
weights."""

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import GROUP
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.graphs.linears import BITS, is_packed
from blockrelay_worker.execution.onnx.graphs.stage import weight_shapes


def bits_of(manifest: Manifest, small: Collection[int]) -> dict[int, int]:
    """Returns the bits (8 or 4) of each block's small weights, by block number, for a device that multiplies by weights
    of the bits in `small`. Blocks with other weights are left out: theirs are widened to floats."""
    wanted = {block: BITS.get(precision, 0) for block, precision in enumerate(manifest.precisions, 1)}
    return {block: bits for block, bits in wanted.items() if bits in small}


def block_weights(folder: BlockFolder, block: int, dtype: FloatType, bits: int = 0) -> dict[str, NDArray[Any]]:
    """Returns the weights of a block by the names of `weight_shapes`: floats of type `dtype`, or bytes for small
    weights of `bits` bits (0: all are floats). Reads one block into memory. Raises BlockFolderError if its file is
    shorter than the manifest says."""
    tensors = folder.tensors(block)
    weights: dict[str, NDArray[Any]] = {}
    for name, shape in weight_shapes(folder.model, block, bits).items():
        if is_packed(name, bits):
            weights[name] = np.ascontiguousarray(_packed(tensors, name).reshape(shape))
        elif bits and name.endswith(".scales"):
            weights[name] = np.ascontiguousarray(_scales(tensors, name.removesuffix(".scales"), shape[1]), dtype)
        else:
            array = tensors[name] if name in tensors else _linear(tensors, name)
            weights[name] = np.ascontiguousarray(array.reshape(shape), dtype)
    return weights


def _packed(tensors: dict[str, NDArray[Any]], kind: str) -> NDArray[np.uint8]:
    """Returns the packed weights of a layer, [N, bytes], in the order of `linears`."""
    if f"{kind}.q4" in tensors:
        return tensors[f"{kind}.q4"].T
    unsigned: NDArray[np.uint8] = tensors[f"{kind}.q"].view(np.uint8) ^ np.uint8(
        128
    )  # from signed numbers to unsigned ones around 128
    return np.pad(unsigned, ((0, -len(unsigned) % GROUP), (0, 0)), constant_values=128).T


def _scales(tensors: dict[str, NDArray[Any]], kind: str, groups: int) -> NDArray[np.float32]:
    """Returns the scales of a layer, [N, groups]."""
    scale: NDArray[np.float32] = tensors[f"{kind}.scale"]
    if f"{kind}.gs" in tensors:
        return (tensors[f"{kind}.gs"].astype(np.float32) * scale).T
    return np.repeat(scale[:, None], groups, axis=1)


def _linear(tensors: dict[str, NDArray[Any]], kind: str) -> NDArray[np.float32]:
    """Returns the weights of a linear layer widened to floats, [K, N], as `block_tensors` defines them."""
    if f"{kind}.w" in tensors:
        return tensors[f"{kind}.w"]
    scale: NDArray[np.float32] = tensors[f"{kind}.scale"]
    if f"{kind}.q" in tensors:
        return tensors[f"{kind}.q"].astype(np.float32) * scale
    pairs: NDArray[np.uint8] = tensors[f"{kind}.q4"]
    nibbles = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(2 * pairs.shape[0], pairs.shape[1])
    factors = np.repeat(tensors[f"{kind}.gs"].astype(np.float32), GROUP, axis=0)
    return (nibbles.astype(np.float32) - 8) * factors * scale
