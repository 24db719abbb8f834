"""A Llama as it was recognised: which weights it has, and where its rows are in the graphs of the blocks."""

from collections.abc import Mapping
from dataclasses import dataclass

from blockrelay.onnx_blocks.llama.graph import Constant, Place
from blockrelay.onnx_blocks.llama.operators import Weight


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the model: all of a constant, or of a matrix or vector the outputs `first` to `stop` - 1."""

    source: Constant | Weight
    first: int
    stop: int

    @property
    def constant(self) -> Constant:
        return self.source.constant if isinstance(self.source, Weight) else self.source

    @property
    def shape(self) -> tuple[int, ...]:
        """As checkpoints have it: a matrix is [outputs, inputs], a norm or a bias a vector."""
        if isinstance(self.source, Weight):
            return (self.stop - self.first, self.source.inputs)
        if self.source.size == max(self.source.shape, default=1):
            return (self.stop - self.first,)
        return (self.stop - self.first, *self.source.shape[1:])


@dataclass(frozen=True, slots=True)
class Frequencies:
    """The angle of a position is it times these, one for each pair of columns of a head; cos and sin are multiplied by
    `factor`."""

    constant: Constant
    factor: float


@dataclass(frozen=True, slots=True)
class Tables:
    """Cos and sin of every position: [positions, head_dim / 2], or [positions, head_dim] with both halves alike."""

    cos: Constant
    sin: Constant


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where a layer's rows are: `hidden` are tensors that add up to the rows behind the layer."""

    hidden: tuple[Place, ...]
    keys: Place
    values: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """All that the graphs say. `parts` are by the names that checkpoints give tensors."""

    parts: Mapping[str, Part]
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    qkv_bias: bool
    qk_norm: bool
    rotary: Frequencies | Tables
    layers: tuple[RowPlaces, ...]
    logits: Place

    @property
    def hidden_size(self) -> int:
        return self.parts["model.norm.weight"].shape[0]

    @property
    def intermediate_size(self) -> int:
        return self.parts["model.layers.0.mlp.up_proj.weight"].shape[0]

    @property
    def vocab_size(self) -> int:
        return self.parts["model.embed_tokens.weight"].shape[0]
