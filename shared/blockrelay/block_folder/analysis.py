"""What a model costs, block by block, from its shape alone. Pure: no weight is read.

Planners work from it, and `blockrelay analyse` prints it.
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

#: Rows travel between stages as float32.
HOP_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block. Bytes are by precision; a precision that the model's widths do not allow is missing."""

    index: int
    layers: int
    """1, or 0 for the block of the head."""
    parameters: int
    bytes: Mapping[Precision, int]
    """Of its file: what a worker maps for it."""
    step_bytes: Mapping[Precision, int]
    """What a step reads of them: all but the embedding, of which it looks up a row for each token."""
    flops_per_row: int
    """In products with weights, 2 for each of them. The head counts where a row's logits are wanted."""
    attention_flops: int
    """Of a row, for each token that it attends to."""
    kv_values_per_token: int
    """Keys and values; `precisions.kv_item_bytes` says how many bytes each has."""
    hop_bytes_per_row: int
    """What a worker of the next block is sent; 0 behind the last block, where tokens come out."""
    hop_bytes_per_row_and_token: int = 0
    """More of that for each token that the row attends to: masks are handed on by ONNX blocks that others made."""
    cpu_bytes: int | None = None
    """What it takes on a CPU, where that is not what it takes elsewhere."""

    @property
    def name(self) -> str:
        return f"block_{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnalysis:
    """All blocks of a model, block i at index i-1. A head that shares the embedding's weights counts like any other:
    a block folder has both."""

    model: str
    context: int
    """Tokens that a request may have at most."""
    blocks: tuple[BlockCost, ...]

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Those that the model can have."""
        return tuple(p for p in PRECISIONS if p in self.blocks[0].bytes)

    def totals(self) -> dict[str, Any]:
        """The sums over all blocks; of the hop what one stage sends to the next for each row."""
        return {
            "parameters": sum(b.parameters for b in self.blocks),
            "bytes": self._summed([b.bytes for b in self.blocks]),
            "flops_per_row": sum(b.flops_per_row for b in self.blocks),
            "attention_flops_per_row_and_token": sum(b.attention_flops for b in self.blocks),
            "kv_bytes_per_token": self._kv_bytes(sum(b.kv_values_per_token for b in self.blocks)),
            "hop_bytes_per_row": self.blocks[0].hop_bytes_per_row,
        }

    def _summed(self, by_precision: Sequence[Mapping[Precision, int]]) -> dict[str, int]:
        return {p: sum(each[p] for each in by_precision) for p in self.precisions}

    def _kv_bytes(self, values: int) -> dict[str, int]:
        """Where all blocks have one precision."""
        return {p: values * kv_item_bytes([p]) for p in self.precisions}

    def to_json(self) -> dict[str, Any]:
        """What `blockrelay analyse --json` prints."""
        return {
            "model": self.model,
            "context": self.context,
            "blocks": {
                b.name: {
                    "parameters": b.parameters,
                    "bytes": dict(b.bytes),
                    "flops_per_row": b.flops_per_row,
                    "attention_flops_per_row_and_token": b.attention_flops,
                    "kv_bytes_per_token": self._kv_bytes(b.kv_values_per_token),
                    "hop_bytes_per_row": b.hop_bytes_per_row,
                }
                for b in self.blocks
            },
            "totals": self.totals(),
        }


def analyse(model: ModelConfig) -> ModelAnalysis:
    """The costs of every block of a model of this shape. UsageError for ONNX blocks that others made."""
    if model.onnx_blocks is not None:
        raise UsageError(
            f"{model.name} is ONNX blocks as they are, whose costs no shape tells; `{typed('profile --blocks')}` "
            f"measures them, and `{typed('import')}` makes a block folder of them"
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
        attention_flops=0 if is_head else 4 * model.heads * model.head_dim,  # two products, two operations each
        kv_values_per_token=0 if is_head else 2 * model.kv_heads * model.head_dim,
        hop_bytes_per_row=0 if is_head else HOP_ITEM_BYTES * model.hidden_size,
    )


def _step_bytes(model: ModelConfig, precision: Precision, index: int) -> int:
    tensors = block_tensors(model, precision, index)
    return place_tensors({name: tensor for name, tensor in tensors.items() if name != "embedding"})[1]
