"""A Llama that was recognised in ONNX blocks: its weights, and where its hidden states are in the blocks' graphs."""

from collections.abc import Mapping
from dataclasses import dataclass

from blockrelay.onnx_blocks.llama.graph import Constant, TensorPlace
from blockrelay.onnx_blocks.llama.operators import Weight


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A tensor of the model: the outputs `first` to `stop` - 1 of a constant or a weight, often all of them.

    One weight may have several tensors, such as queries, keys and values.
    """

    source: Constant | Weight
    first: int
    stop: int

    @property
    def constant(self) -> Constant:
        return self.source.constant if isinstance(self.source, Weight) else self.source

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in a checkpoint: [outputs, inputs] for a matrix, one dimension for a norm or a bias."""
        if isinstance(self.source, Weight):
            return (self.stop - self.first, self.source.inputs)
        if self.source.size == max(self.source.shape, default=1):
            return (self.stop - self.first,)
        return (self.stop - self.first, *self.source.shape[1:])


@dataclass(frozen=True, slots=True)
class Frequencies:
    """A rotation by frequencies: the angle of a position is the position times the frequency."""

    constant: Constant
    """One frequency for each pair of columns of a head."""
    factor: float
    """A number by which cos and sin are multiplied."""


@dataclass(frozen=True, slots=True)
class RotationTables:
    """A rotation by tables of cos and sin: [positions, head_dim / 2], or [positions, head_dim] with equal halves.

    The two may be swapped, if no operator tells which is which: the cosines of position 0 are not 0.
    """

    cos: Constant
    sin: Constant


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """The places of one layer's results in the graphs."""

    hidden: tuple[TensorPlace, ...]
    """Tensors whose sum is the hidden states behind the layer."""
    keys: TensorPlace
    values: TensorPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """The shape, weights and places of a Llama, as far as the graphs show them."""

    parts: Mapping[str, TensorSlice]
    """The tensors by their names in checkpoints of Hugging Face, such as `model.norm.weight`."""
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    """The epsilon of all RMS norms."""
    qkv_bias: bool
    qk_norm: bool
    rotary: Frequencies | RotationTables
    layers: tuple[RowPlaces, ...]
    logits: TensorPlace

    @property
    def hidden_size(self) -> int:
        return self.parts["model.norm.weight"].shape[0]

    @property
    def intermediate_size(self) -> int:
        return self.parts["model.layers.0.mlp.up_proj.weight"].shape[0]

    @property
    def vocab_size(self) -> int:
        return self.parts["model.embed_tokens.weight"].shape[0]
