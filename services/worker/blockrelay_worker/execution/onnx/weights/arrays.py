"""What the blocks of a folder multiply with: as floats, to which weights of every precision are widened, or small."""

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
    """Block -> bits of its weights on a device that multiplies by `small` ones, of so many bits; without the others."""
    wanted = {block: BITS.get(precision, 0) for block, precision in enumerate(manifest.precisions, 1)}
    return {block: bits for block, bits in wanted.items() if bits in small}


def block_weights(folder: BlockFolder, block: int, dtype: FloatType, bits: int = 0) -> dict[str, NDArray[Any]]:
    """Name -> array of `weight_shapes`, of the type `dtype`, or bytes. One block in memory at a time."""
    tensors = folder.tensors(block)
    found: dict[str, NDArray[Any]] = {}
    for name, shape in weight_shapes(folder.model, block, bits).items():
        if is_packed(name, bits):
            found[name] = np.ascontiguousarray(_packed(tensors, name).reshape(shape))
        elif bits and name.endswith(".scales"):
            found[name] = np.ascontiguousarray(_scales(tensors, name.removesuffix(".scales"), shape[1]), dtype)
        else:
            array = tensors[name] if name in tensors else _linear(tensors, name)
            found[name] = np.ascontiguousarray(array.reshape(shape), dtype)
    return found


def _packed(tensors: dict[str, NDArray[Any]], kind: str) -> NDArray[np.uint8]:
    """[N, bytes], in the order of `linears`."""
    if f"{kind}.q4" in tensors:
        return tensors[f"{kind}.q4"].T
    unsigned: NDArray[np.uint8] = tensors[f"{kind}.q"].view(np.uint8) ^ np.uint8(128)  # around 128 in place of 0
    return np.pad(unsigned, ((0, -len(unsigned) % GROUP), (0, 0)), constant_values=128).T


def _scales(tensors: dict[str, NDArray[Any]], kind: str, groups: int) -> NDArray[np.float32]:
    """[N, groups]."""
    scale: NDArray[np.float32] = tensors[f"{kind}.scale"]
    if f"{kind}.gs" in tensors:
        return (tensors[f"{kind}.gs"].astype(np.float32) * scale).T
    return np.repeat(scale[:, None], groups, axis=1)


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
