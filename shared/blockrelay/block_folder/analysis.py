"""The costs of a model's blocks (bytes, operations, KV), computed from its shape alone: no weight is read.

Planners work from them, and `blockrelay analyse` prints them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from blockrelay.block_folder.manifest import place_tensors
from blockrelay.block_folder.model import PRECISIONS, ModelConfig, Precision, block_linears, block_tensors, ungroupable
from blockrelay.block_folder.precisions import kv_item_bytes
from blockrelay.errors import UsageError
from blockrelay.typed_command import typed

#: Bytes of one number of a hidden state on its way between stages: float32.
HOP_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """The costs of one block. A precision that the model's widths do not allow is missing in `bytes` and `step_bytes`.

    For ONNX blocks made by others the two have only the precision of the KV. A row is the hidden state of one token.
    """

    index: int
    """1 to N."""
    layers: int
    """Layers of the model in the block: 1, or 0 for the head. ONNX blocks made by others may have several."""
    parameters: int
    bytes: Mapping[Precision, int]
    """Size of the block's file, which a worker maps, by precision."""
    step_bytes: Mapping[Precision, int]
    """Bytes that one step reads, by precision: all but the embedding, in which it looks up one row for each token."""
    flops_per_row: int
    """Operations of the linear layers for one row, 2 for each weight. The head's count only for rows with logits."""
    attention_flops: int
    """Operations of attention for one row and each token that it attends to."""
    kv_values_per_token: int
    """Numbers in the keys and values of one token; `precisions.kv_item_bytes` says how many bytes each has."""
    hop_bytes_per_row: int
    """Bytes that a stage which ends with this block sends to the next one for each row; 0 for the last block."""
    hop_bytes_per_row_and_token: int = 0
    """Further bytes for each row and each token that it attends to: ONNX blocks made by others hand on masks."""
    cpu_bytes: int | None = None
    """Bytes of the weights on a CPU; None if they are the same as on other devices."""

    @property
    def name(self) -> str:
        return f"block_{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnalysis:
    """The costs of all blocks of a model, block i at index i-1.

    A head that shares the embedding's weights counts like any other, because a block folder has both.
    """

    model: str
    context: int
    """Most tokens that a request may have."""
    blocks: tuple[BlockCost, ...]

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions that `BlockCost.bytes` has: those that the model's widths allow, or that of ONNX blocks."""
        return tuple(p for p in PRECISIONS if p in self.blocks[0].bytes)

    def totals(self) -> dict[str, Any]:
        """Returns the sums over all blocks, in the form that `to_json` has for each block.

        `bytes` and `kv_bytes_per_token` are by precision. `hop_bytes_per_row` is that of one hop between stages.
        """
        return self._summed(self.blocks)

    def _summed(self, blocks: Sequence[BlockCost]) -> dict[str, Any]:
        values = sum(b.kv_values_per_token for b in blocks)
        return {
            "parameters": sum(b.parameters for b in blocks),
            "bytes": {p: sum(b.bytes[p] for b in blocks) for p in self.precisions},
            "flops_per_row": sum(b.flops_per_row for b in blocks),
            "attention_flops_per_row_and_token": sum(b.attention_flops for b in blocks),
            "kv_bytes_per_token": {p: values * kv_item_bytes([p]) for p in self.precisions},
            "hop_bytes_per_row": blocks[0].hop_bytes_per_row,
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the costs as `blockrelay analyse --json` prints them: those of each block by its name, and totals."""
        return {
            "model": self.model,
            "context": self.context,
            "blocks": {b.name: self._summed([b]) for b in self.blocks},
            "totals": self.totals(),
        }


def analyse(model: ModelConfig) -> ModelAnalysis:
    """Returns the costs of every block of `model`. Raises UsageError for ONNX blocks made by others."""
    if model.onnx_blocks is not None:
        raise UsageError(
            f"{model.name} consists of ONNX blocks as they are, whose costs cannot be computed from a shape; "
            f"`{typed('profile --blocks')}` measures them, and `{typed('import')}` makes a block folder of them"
        )
    precisions: tuple[Precision, ...] = tuple(p for p in PRECISIONS if ungroupable(model, (p,) * model.blocks) is None)
    return ModelAnalysis(
        model=model.name,
        context=model.max_position,
        blocks=tuple(_block(model, index, precisions) for index in range(1, model.blocks + 1)),
    )


def _block(model: ModelConfig, index: int, precisions: tuple[Precision, ...]) -> BlockCost:
    is_head = index == model.blocks
    return BlockCost(
        index=index,
        layers=0 if is_head else 1,
        parameters=sum(prod(shape) for _, shape in block_tensors(model, "fp32", index).values()),
        bytes={p: place_tensors(block_tensors(model, p, index))[1] for p in precisions},
        step_bytes={p: _step_bytes(model, p, index) for p in precisions},
        flops_per_row=sum(2 * prod(model.linear_shape(kind)) for kind in block_linears(index, model.blocks)),
        attention_flops=0
        if is_head
        else 4 * model.heads * model.head_dim,  # two matmuls, two operations for each number
        kv_values_per_token=0 if is_head else 2 * model.kv_heads * model.head_dim,
        hop_bytes_per_row=0 if is_head else HOP_ITEM_BYTES * model.hidden_size,
    )


def _step_bytes(model: ModelConfig, precision: Precision, index: int) -> int:
    tensors = block_tensors(model, precision, index)
    return place_tensors({name: tensor for name, tensor in tensors.items() if name != "embedding"})[1]
