"""Runs the model in float64, a matrix at a time, so that calibration sees the input of every linear layer.

The result decides how weights are rounded, which goes into the model's hash, hence float64: BLAS adds in another order
on another machine, and a difference of 1e-14 rounds hardly any weight another way.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import ModelConfig
from blockrelay_converter.block_writer import BlockSource
from blockrelay_converter.weight_source import F64

Watch = Callable[[str, F64], None]
"""A function that is called with (kind of linear layer, its input [rows, K]) before the layer runs.

The kinds are those of `model.LINEARS`: qkv, o, gate_up, down and head. It must not change the input.
"""


class FloatModel:
    """The model in float64, for S sequences of equal length L. Activations are [S * L, width], one after the other."""

    def __init__(self, source: BlockSource, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> None:
        """Takes the weights and the rotary tables `cos` and `sin` of positions 0 to L - 1, [L, head_dim/2]."""
        self._source = source
        self._model: ModelConfig = source.model
        self._cos, self._sin = cos.astype(np.float64), sin.astype(np.float64)

    def embed(self, tokens: NDArray[np.int64]) -> F64:
        """Returns the embeddings of `tokens` [S * L] as [S * L, hidden]."""
        return self._source.embedding_rows(tokens).astype(np.float64)

    def layer(self, x: F64, index: int, watch: Watch) -> None:
        """Runs layer block `index`, from 1, on `x` [S * L, hidden], in place. The embedding of block 1 is not run."""
        model, width = self._model, self._model.intermediate_size
        normed = self._norm(x, index, "norm_attention")
        watch("qkv", normed)
        mixed = self._attention(self._linear(normed, index, "qkv"), index)
        watch("o", mixed)
        x += self._linear(mixed, index, "o")
        normed = self._norm(x, index, "norm_mlp")
        watch("gate_up", normed)
        gate_up = self._linear(normed, index, "gate_up")
        gate = gate_up[:, :width]
        with np.errstate(over="ignore"):  # exp of a large negative gate: the quotient is 0, as it should be
            inner = gate / (1 + np.exp(-gate)) * gate_up[:, width:]
        del gate, gate_up  # the largest matrices
        watch("down", inner)
        x += self._linear(inner, index, "down")
        assert x.shape[1] == model.hidden_size

    def head(self, x: F64, watch: Watch) -> None:
        """Calls `watch` with the input of the head; its output is of no use to calibration."""
        watch("head", self._norm(x, self._model.blocks, "norm_final"))

    def _norm(self, x: F64, index: int, name: str) -> F64:
        return self._normed(x, self._source.whole(index, name))

    def _normed(self, x: F64, weight: NDArray[np.float32]) -> F64:
        return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + self._model.rms_norm_eps) * weight

    def _linear(self, x: F64, index: int, linear: str) -> F64:
        out = np.empty((x.shape[0], self._model.linear_shape(linear)[1]))
        for columns, weights in self._source.chunks(index, linear):
            out[:, columns] = x @ weights.astype(np.float64).T
        return out

    def _attention(self, qkv: F64, index: int) -> F64:
        """Returns the causal attention, [S * L, Hq D], for `qkv` [S * L, (Hq + 2 Hkv) D], which may change.

        Adds the bias and applies the head norms and the rotation first.
        """
        model = self._model
        heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
        if model.qkv_bias:
            qkv += self._source.whole(index, "qkv.bias")
        length = self._cos.shape[0]
        every = qkv.reshape(-1, length, heads + 2 * kv_heads, dim).swapaxes(1, 2)  # [S, heads, L, D]
        q, k, v = every[:, :heads], every[:, heads : heads + kv_heads], every[:, heads + kv_heads :]
        if model.qk_norm:
            q = self._normed(q, self._source.whole(index, "norm_q"))
            k = self._normed(k, self._source.whole(index, "norm_k"))
        q, k = self._rotated(q), self._rotated(k)
        future = np.triu(np.ones((length, length), np.bool_), 1)
        mixed = np.empty((q.shape[0], length, heads, dim))
        for sequence in range(q.shape[0]):
            for head in range(heads):
                shared = head // (heads // kv_heads)
                scores = q[sequence, head] @ k[sequence, shared].T / np.sqrt(dim)
                scores[future] = -np.inf
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                mixed[sequence, :, head] = weights @ v[sequence, shared] / weights.sum(axis=-1, keepdims=True)
        return mixed.reshape(-1, heads * dim)

    def _rotated(self, x: F64) -> F64:
        """Rotates the pairs (d, d + D/2) of `x` [S, heads, L, D] by their positions."""
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * self._cos - second * self._sin, second * self._cos + first * self._sin], axis=-1)
