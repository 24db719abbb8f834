"""Gives the weights of a Llama in ONNX blocks, by the names and in the shapes that checkpoints have."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import FLOATS, GROUP, LINEARS, ModelConfig, Precision, block_linears
from blockrelay.onnx_blocks.llama.graph import Constant
from blockrelay.onnx_blocks.llama.model import Llama, TensorSlice
from blockrelay.onnx_blocks.llama.operators import Packed, Weight
from blockrelay_converter.onnx_source.files import OnnxBlocks
from blockrelay_converter.onnx_source.unpacking import as_groups, unpacked, zero_points
from blockrelay_converter.weight_source import Groups

_FLOATS = ("float16", "float32")
#: The checkpoint's tensors that each linear layer of a block folder consists of; the head is a tensor of its own.
_OF_LINEARS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
assert {*_OF_LINEARS, "head"} == set(LINEARS)


@dataclass(frozen=True, slots=True)
class OnnxTensor:
    """A tensor of the model, read from the file of an ONNX block. Implements `weight_source.SourceTensor`."""

    blocks: OnnxBlocks
    part: TensorSlice

    @property
    def name(self) -> str:
        return f"{self.part.constant.file}: {self.part.constant.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Returns rows `start` to `stop - 1` in float32. Raises OnnxBlocksError if a value is not finite."""
        source, first, stop = self.part.source, self.part.first + start, self.part.first + stop
        first_row = slice(first, stop)
        if isinstance(source, Constant):
            array = self.blocks.array(source)
            values = (array.reshape(-1) if len(self.shape) == 1 else array)[first_row].astype(np.float32)
        elif source.packed is not None:
            q, scales, zeros = self._packed(source, source.packed, first, stop)
            values = unpacked(q, scales, zeros, bits=source.packed.bits, inputs=source.inputs)
        else:
            array = self.blocks.array(source.constant)
            values = (array[first_row] if source.rows else array[:, first_row].T).astype(np.float32)
        if not np.isfinite(values).all():
            constant = self.part.constant
            raise constant.error("holds values that are not finite")
        return values

    def groups(self, start: int, stop: int) -> Groups | None:
        """Returns the same rows in w4a8 if they are stored in 4 bits and need no rounding for it, else None."""
        source = self.part.source
        if isinstance(source, Constant) or source.packed is None or source.packed.bits != 4 or source.inputs % GROUP:
            return None
        return as_groups(*self._packed(source, source.packed, self.part.first + start, self.part.first + stop))

    def forget(self) -> None:
        """Releases the memory of all ONNX blocks; they may be read again."""
        self.blocks.forget()

    def _packed(
        self, weight: Weight, packed: Packed, first: int, stop: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
        """Returns the packed numbers [rows, groups, bytes], scales and zero points [rows, groups] of some rows."""
        count, groups = weight.outputs, -(-weight.inputs // packed.group)
        q = self.blocks.array(weight.constant).reshape(count, groups, -1)[first:stop]
        scales = self.blocks.array(packed.scales).reshape(count, groups)[first:stop].astype(np.float32)
        stored = None if packed.zero_points is None else self.blocks.array(packed.zero_points)
        zeros = zero_points(stored, bits=packed.bits, rows=count, groups=groups)[first:stop]
        return q, scales, zeros


class OnnxWeights:
    """All tensors of a model that was recognised in ONNX blocks. Implements `weight_source.WeightSource`."""

    def __init__(self, blocks: OnnxBlocks, llama: Llama) -> None:
        """Raises OnnxBlocksError for weights of a type that cannot be read."""
        self._blocks, self._llama = blocks, llama
        for part in llama.parts.values():
            source = part.source
            floats = part.constant if isinstance(source, Constant) or source.packed is None else source.packed.scales
            if floats.dtype not in _FLOATS:
                raise floats.error(f"is {floats.dtype}; weights must be {' or '.join(_FLOATS)}")

    def names(self) -> AbstractSet[str]:
        """Returns the names of all tensors, as checkpoints have them."""
        return self._llama.parts.keys()

    def tensor(self, name: str, shape: tuple[int, ...]) -> OnnxTensor:
        """Returns the tensor `name`, one of `names`. Raises OnnxBlocksError if its shape is not `shape`."""
        tensor = OnnxTensor(self._blocks, self._llama.parts[name])
        if tensor.shape != shape:
            constant = tensor.part.constant
            raise constant.error(
                f"has shape {list(tensor.shape)} as {name}, and the other weights ask for {list(shape)}"
            )
        return tensor

    def float_precision(self) -> Precision:
        """Returns the float precision of the type in which weights are stored: fp16 for float16, fp32 for float32.

        For packed weights it is that of their scales; fp16 may round them. All weights are taken to have the type of
        layer 0's query projection.
        """
        first = self._llama.parts["model.layers.0.self_attn.q_proj.weight"]
        source = first.source
        packed = None if isinstance(source, Constant) else source.packed
        dtype = first.constant.dtype if packed is None else packed.scales.dtype
        return next(precision for precision, name in FLOATS.items() if name == dtype)

    def stored_precisions(self, model: ModelConfig) -> tuple[Precision, ...]:
        """Returns the precision of each block: w4a8 if all its linear layers can be kept in it, else `float_precision`.

        Reads all scales.
        """
        plain = self.float_precision()
        precisions: list[Precision] = []
        for index in range(1, model.blocks + 1):
            names = _tensors(index, model.blocks)
            precisions.append("w4a8" if all(self._is_stored_in_groups(name) for name in names) else plain)
            self._blocks.forget()
        return tuple(precisions)

    def widened(self, precisions: Sequence[Precision]) -> list[int]:
        """Returns the numbers (from 1) of blocks whose packed weights become floats in `precisions`, one per block."""
        return [
            index
            for index, precision in enumerate(precisions, 1)
            if precision in FLOATS and any(map(self._is_packed, _tensors(index, len(precisions))))
        ]

    def packed_kinds(self) -> tuple[str, ...]:
        """Returns the kinds of packed weights as text for people: `4 bits in groups of 32`."""
        packed = [part.source.packed for part in self._llama.parts.values() if isinstance(part.source, Weight)]
        kinds = {f"{one.bits} bits in groups of {one.group}" for one in packed if one is not None}
        return tuple(sorted(kinds))

    def _is_packed(self, name: str) -> bool:
        source = self._llama.parts[name].source
        return isinstance(source, Weight) and source.packed is not None

    def _is_stored_in_groups(self, name: str) -> bool:
        tensor = OnnxTensor(self._blocks, self._llama.parts[name])
        return tensor.groups(0, tensor.shape[0]) is not None


def _tensors(index: int, blocks: int) -> list[str]:
    """Returns the names of the weights of all linear layers of block `index` of `blocks`."""
    names: list[str] = []
    for linear in block_linears(index, blocks):
        own = ["lm_head"] if linear == "head" else [f"model.layers.{index - 1}.{name}" for name in _OF_LINEARS[linear]]
        names += [f"{name}.weight" for name in own]
    return names
