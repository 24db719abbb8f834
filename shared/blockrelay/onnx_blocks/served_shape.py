"""The shape of KV and logits of ONNX blocks that are served as they are, from what their files declare."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blockrelay.block_folder.manifest import ONNX_BLOCKS_NAME
from blockrelay.onnx_blocks.blocks_file import read_blocks_file
from blockrelay.onnx_blocks.cache_names import CacheSlot
from blockrelay.onnx_blocks.signature import Signature, Tensor, shown
from blockrelay.onnx_blocks.wiring import FromPast, FromRequest, Wiring, wire

LOGITS = "logits"
_FLOATS = ("float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedShape:
    """The shape of a model of ONNX blocks. Keys and values are [batch, kv_heads, positions, head_dim] of `dtype`."""

    layers: tuple[int, ...]
    """The exporter's numbers of the layers, in the order of their blocks."""
    block_layers: tuple[int, ...]
    """The number of layers in each block."""
    kv_heads: int
    head_dim: int
    dtype: Literal["float16", "float32"]
    vocabulary: int
    single: bool
    """True if the graphs take one sequence at a time."""

    def pool_of(self, slot: CacheSlot) -> str:
        """Returns the name of the pool with the KV pages of `slot`, of a layer in `layers`. Pools count from 1."""
        return f"block_{self.layers.index(slot.layer) + 1}/{slot.half}s"


def served_wiring(root: Path) -> Wiring:
    """Returns the wiring of the ONNX blocks of the block folder `root`, from its `blocks.json`.

    The manifest has the SHA-256 of that file. Raises OnnxBlocksError for a file that cannot be read, and for blocks
    that do not fit together.
    """
    return wire([block.signature for block in read_blocks_file(root / ONNX_BLOCKS_NAME)])


def served_shape(wiring: Wiring) -> ServedShape:
    """Returns the shape of the model of these blocks.

    Raises OnnxBlocksError, with the file and often the tensor, if they take no token ids, or if their KV is of a kind
    that cannot be served. It also raises it unless they give float16 or float32 logits [batch, positions, vocabulary]
    of a known vocabulary.
    """
    source, logits = logits_of(wiring)
    if not _token_inputs(wiring):
        raise wiring.blocks[0].error("no block takes input_ids: requests bring token ids")
    if not wiring.presents:
        raise wiring.blocks[0].error(
            "no block has a cache (past_key_values... and present...): every token would be computed anew"
        )
    layers = _layers(wiring)
    heads, size, dtype = _cache(wiring)
    vocabulary = logits.dims[-1] if logits.dims else None
    if not isinstance(vocabulary, int) or logits.rank != 3 or logits.dtype not in _FLOATS:
        raise source.error(
            f"is {logits.dtype} {shown(logits.dims)}, and must be float16 or float32 [batch, positions, vocabulary] "
            "with a vocabulary that the file tells",
            LOGITS,
        )
    return ServedShape(
        layers=tuple(layer for block in layers for layer in block),
        block_layers=tuple(len(block) for block in layers),
        kv_heads=heads,
        head_dim=size,
        dtype=dtype,
        vocabulary=vocabulary,
        single=takes_one_sequence(wiring),
    )


def takes_one_sequence(wiring: Wiring) -> bool:
    """Returns whether the graphs declare a batch of 1, so that a run takes one sequence."""
    return any(tensor.dims is not None and tensor.dims[0] == 1 for tensor in _token_inputs(wiring))


def _token_inputs(wiring: Wiring) -> list[Tensor]:
    return [tensor for block in wiring.blocks for tensor in block.inputs if tensor.name == "input_ids"]


def _layers(wiring: Wiring) -> list[list[int]]:
    """Returns the layers of each block, ascending.

    Raises OnnxBlocksError for keys without values, and for keys and values that two blocks make: the KV of a layer is
    where its block is.
    """
    layers: list[list[int]] = [[] for _ in wiring.blocks]
    for slot, present in sorted(wiring.presents.items()):
        other = wiring.presents.get(CacheSlot(slot.layer, "value" if slot.half == "key" else "key"))
        block = wiring.blocks[present.index - 1]
        if other is None:
            lacking = "values" if slot.half == "key" else "keys"
            raise block.error(f"layer {slot.layer} has no {lacking}", present.name)
        if other.index != present.index:
            raise block.error(
                f"is {slot}, and {wiring.blocks[other.index - 1].file} makes {other.name}: the keys and values of a "
                "layer must be made by one block",
                present.name,
            )
        if slot.half == "key":
            layers[present.index - 1].append(slot.layer)
    return layers


def logits_of(wiring: Wiring) -> tuple[Signature, Tensor]:
    """Returns the block that gives logits, and that output. Raises OnnxBlocksError if no block has it."""
    for block in wiring.blocks:
        for tensor in block.outputs:
            if tensor.name == LOGITS:
                return block, tensor
    last = wiring.blocks[-1]
    raise last.error(f"has no output {LOGITS}, and nor has another block: is the last one missing?")


def _cache(wiring: Wiring) -> tuple[int, int, Literal["float16", "float32"]]:
    """Returns number, size and dtype of the KV heads. Raises OnnxBlocksError unless all layers have the same."""
    common: tuple[int, int, str] | None = None
    known: dict[tuple[CacheSlot, int], int] = {}
    tensors = list(_caches(wiring))
    for _, slot, tensor in tensors:
        for axis in (1, 3):
            if tensor.dims is not None and isinstance(tensor.dims[axis], int):
                known[slot, axis] = int(tensor.dims[axis])
    for block, slot, tensor in tensors:
        heads, size = known.get((slot, 1)), known.get((slot, 3))
        if not heads or not size:
            raise block.error(
                f"is {shown(tensor.dims)}: serving needs to know how many heads there are, and how large each is",
                tensor.name,
            )
        own = heads, size, tensor.dtype
        if common is not None and own != common:
            raise block.error(
                f"has {heads} heads of {size} in {tensor.dtype}, and other layers {common[0]} of {common[1]} in "
                f"{common[2]}: layers that differ cannot be served",
                tensor.name,
            )
        if tensor.dtype not in _FLOATS:
            raise block.error(f"is {tensor.dtype}; KV must be float16 or float32", tensor.name)
        common = own
    assert common is not None, "there are presents"
    return common[0], common[1], "float16" if common[2] == "float16" else "float32"


def _caches(wiring: Wiring) -> Iterator[tuple[Signature, CacheSlot, Tensor]]:
    """Yields every past and present: its block, its slot, and the tensor."""
    made = {(present.index, present.name): slot for slot, present in wiring.presents.items()}
    for block, sources in zip(wiring.blocks, wiring.sources, strict=True):
        for tensor in block.inputs:
            source = sources[tensor.name]
            if isinstance(source, FromPast):
                yield block, source.slot, tensor
        for tensor in block.outputs:
            if (block.index, tensor.name) in made:
                yield block, made[block.index, tensor.name], tensor


def request_inputs(wiring: Wiring) -> dict[str, str]:
    """Returns the dtype of each input that comes from the request, by name."""
    return {
        tensor.name: tensor.dtype
        for block, sources in zip(wiring.blocks, wiring.sources, strict=True)
        for tensor in block.inputs
        if isinstance(sources[tensor.name], FromRequest)
    }
