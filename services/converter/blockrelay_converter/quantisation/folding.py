"""Powers of two moved from one tensor of a block into another, so that the block computes the same and rounds less.

A w8a8 row has one scale for all its channels: one channel a hundred times larger than the others leaves them two or
three of the 255 levels. Dividing that channel where it is made and multiplying the weights that read it by the same
power of two changes nothing of what the block computes in floats (short of overflow), while levels are shared fairly.

    read by      made by
    qkv          norm_attention
    o            the v rows of qkv and of its bias; each is shared by the query heads of its group
    gate_up      norm_mlp
    down         the up rows of gate_up (SwiGLU is linear in them)
    head         norm_final
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import ModelConfig

Exponents = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding:
    """What happens to the tensors of one block: value -> value * 2**exponent.

    `rows`: tensor name (a linear without its .q or .scale) -> one exponent per entry of the checkpoint's first axis.
    `columns`: linear -> one exponent per input channel. A tensor that is in neither stays as it is.
    """

    rows: Mapping[str, Exponents] = field(default_factory=dict[str, Exponents])
    columns: Mapping[str, Exponents] = field(default_factory=dict[str, Exponents])

    def apply(self, name: str, part: slice, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Entries `part` of tensor `name` after the folding; exact."""
        if (exponents := self.rows.get(name)) is not None:
            shape = (-1,) + (1,) * (values.ndim - 1)
            values = np.ldexp(values, exponents[part].reshape(shape))
        if (exponents := self.columns.get(name)) is not None:
            values = np.ldexp(values, exponents)
        return values


NO_FOLDING = Folding()


def channels_of(model: ModelConfig, linear: str) -> NDArray[np.intp]:
    """[K]: which exponent each input channel of a linear uses; only `o` shares them."""
    inputs = np.arange(model.linear_shape(linear)[0])
    if linear != "o":
        return inputs
    head, position = np.divmod(inputs, model.head_dim)
    return head // (model.heads // model.kv_heads) * model.head_dim + position


def layer_folding(model: ModelConfig, exponents: Mapping[str, Exponents]) -> Folding:
    """The folding of a block that divides the inputs of its linears by 2**exponent (of `o`: one per shared channel)."""
    rows: dict[str, Exponents] = {}
    columns = {linear: found[channels_of(model, linear)] for linear, found in exponents.items()}
    for linear, norm in (("qkv", "norm_attention"), ("gate_up", "norm_mlp"), ("head", "norm_final")):
        if linear in exponents:
            rows[norm] = -exponents[linear]
    if "o" in exponents:
        rows["qkv"] = np.zeros(model.qkv_columns, np.int32)
        rows["qkv"][-model.kv_heads * model.head_dim :] = -exponents["o"]
        rows["qkv.bias"] = rows["qkv"]
    if "down" in exponents:
        untouched = np.zeros(model.intermediate_size, np.int32)  # the gate
        rows["gate_up"] = np.concatenate([untouched, -exponents["down"]])
    return Folding(rows=rows, columns=columns)
