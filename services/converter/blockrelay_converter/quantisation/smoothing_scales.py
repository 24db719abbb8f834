"""Applies smoothing (SmoothQuant): moves powers of two from the inputs of linear layers into their weights.

In w8a8 all channels of a token share one scale: one channel a hundred times larger than the others leaves them two or
three of the 255 levels. That channel is divided where it is produced, and the weights that read it are multiplied, by
the same power of two. The block computes the same in floats (short of overflow) and loses less to rounding.

    read by      produced by
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
"""Exponents of powers of two, one per channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothing:
    """The smoothing of one block: each value becomes value * 2**exponent.

    `rows` has one exponent per entry of a tensor's first axis, which are the outputs of a linear layer. `columns` has
    one exponent per input channel of a linear layer. Keys are names of tensors in a block file, without .w, .q or
    .q4: `norm_attention`, `qkv`, `qkv.bias`. Other tensors stay as they are.
    """

    rows: Mapping[str, Exponents] = field(default_factory=dict[str, Exponents])
    columns: Mapping[str, Exponents] = field(default_factory=dict[str, Exponents])

    def apply(self, name: str, part: slice, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns `values` after smoothing, as a new array or unchanged; nothing is rounded.

        `values` are the entries `part` of the first axis of tensor `name`, [outputs, inputs] for a linear layer.
        """
        if (exponents := self.rows.get(name)) is not None:
            shape = (-1,) + (1,) * (values.ndim - 1)
            values = np.ldexp(values, exponents[part].reshape(shape))
        if (exponents := self.columns.get(name)) is not None:
            values = np.ldexp(values, exponents)
        return values


NO_SMOOTHING = Smoothing()


def channels_of(model: ModelConfig, linear: str) -> NDArray[np.intp]:
    """Returns the index of the exponent of each input channel of a linear, [K].

    Only channels of `o` share exponents: the query heads of a group read the same value head.
    """
    inputs = np.arange(model.linear_shape(linear)[0])
    if linear != "o":
        return inputs
    head, position = np.divmod(inputs, model.head_dim)
    return head // (model.heads // model.kv_heads) * model.head_dim + position


def layer_smoothing(model: ModelConfig, exponents: Mapping[str, Exponents]) -> Smoothing:
    """Returns the smoothing that divides the inputs of a block's linears by 2**exponent.

    `exponents` has an array for each linear to smooth: one exponent per input channel, for `o` one per channel of the
    value heads, [kv_heads * head_dim].
    """
    rows: dict[str, Exponents] = {}
    columns = {linear: each[channels_of(model, linear)] for linear, each in exponents.items()}
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
    return Smoothing(rows=rows, columns=columns)
