"""The weights of a folder's blocks as arrays for a device: floats, to which all precisions can be widened, or small
weights."""

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.model import GROUP, hadamard_size
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.graphs.linears import BITS, PLAIN_FORM, BlockForm, hadamard_unit, is_packed
from blockrelay_worker.execution.onnx.graphs.stage import weight_shapes


def forms_of(manifest: Manifest, small: Collection[int]) -> dict[int, BlockForm]:
    """Returns the form of each block's linear layers, by block number, on a device that multiplies by weights of the
    bits (8, 4) in `small`. Other weights are widened to floats."""
    forms: dict[int, BlockForm] = {}
    for block, precision in enumerate(manifest.precisions, 1):
        bits = BITS.get(precision, 0)
        # The last block, the head, has no `down`.
        size = hadamard_size(manifest.model, precision) if block < manifest.model.blocks else 0
        forms[block] = BlockForm(bits if bits in small else 0, size)
    return forms


def bits_in(forms: Iterable[BlockForm]) -> list[int]:
    """Returns the bits of small weights in `forms`, each once, in ascending order; empty if all weights are floats."""
    return sorted({form.bits for form in forms} - {0})


def block_weights(
    folder: BlockFolder, block: int, dtype: FloatType, form: BlockForm = PLAIN_FORM
) -> dict[str, NDArray[Any]]:
    """Returns the weights of a block by the names of `weight_shapes`: floats of type `dtype`, or bytes where `form` has
    small weights. Reads one block into memory. Raises BlockFolderError if its file is shorter than the manifest says.
    """
    tensors, bits = folder.tensors(block), form.bits
    if form.hadamard:
        tensors["down.scale"] = tensors["down.scale"] / np.float32(hadamard_unit(form.hadamard))
    weights: dict[str, NDArray[Any]] = {}
    for name, shape in weight_shapes(folder.model, block, bits).items():
        if is_packed(name, bits):
            weights[name] = np.ascontiguousarray(_packed(tensors, name).reshape(shape))
        elif bits and name.endswith(".scales"):
            weights[name] = np.ascontiguousarray(_scales(tensors, name.removesuffix(".scales"), shape[1]), dtype)
        elif bits and name.endswith(".minimums"):
            weights[name] = np.ascontiguousarray(_minimums(tensors, name.removesuffix(".minimums")), dtype)
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
    if f"{kind}.gs" in tensors:
        return tensors[f"{kind}.gs"].astype(np.float32).T
    return np.repeat(tensors[f"{kind}.scale"][:, None], groups, axis=1)


def _minimums(tensors: dict[str, NDArray[Any]], kind: str) -> NDArray[np.float32]:
    """Returns what the weights of each group share beside (nibble - 8) * scale, [groups, N]."""
    scales: NDArray[np.float32] = tensors[f"{kind}.gs"].astype(np.float32)
    return tensors[f"{kind}.gm"].astype(np.float32) + 8 * scales


def _linear(tensors: dict[str, NDArray[Any]], kind: str) -> NDArray[np.float32]:
    """Returns the weights of a linear layer widened to floats, [K, N], as `block_tensors` defines them."""
    if f"{kind}.w" in tensors:
        return tensors[f"{kind}.w"]
    if f"{kind}.q" in tensors:
        return tensors[f"{kind}.q"].astype(np.float32) * tensors[f"{kind}.scale"]
    pairs: NDArray[np.uint8] = tensors[f"{kind}.q4"]
    nibbles = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(2 * pairs.shape[0], pairs.shape[1])
    scales, minimums = (np.repeat(tensors[f"{kind}.{part}"].astype(np.float32), GROUP, axis=0) for part in ("gs", "gm"))
    return nibbles.astype(np.float32) * scales + minimums
