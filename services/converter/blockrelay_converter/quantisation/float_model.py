"""The model in float64, a matrix at a time: what calibration looks at.

Float64 because the result decides on powers of two that go into a model's hash: BLAS adds in another order on another
machine, and what differs there by 1e-14 rounds to another power of two once in many million channels.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import ModelConfig
from blockrelay_converter.block_writer import BlockSource

F64 = NDArray[np.float64]
Watch = Callable[[str, F64], None]
"""Called with (linear, its input [rows, K]) before the linear runs."""


class FloatModel:
    """Runs sequences of equal length L; rows are [S * L, width], sequence after sequence."""

    def __init__(self, source: BlockSource, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> None:
        """cos and sin: [L, head_dim/2] of positions 0..L-1. `source` must not fold anything."""
        self._source = source
        self._model: ModelConfig = source.model
        self._cos, self._sin = cos.astype(np.float64), sin.astype(np.float64)

    def embed(self, tokens: NDArray[np.int64]) -> F64:
        """tokens [S * L] -> [S * L, hidden]."""
        return self._source.embedding_rows(tokens).astype(np.float64)

    def layer(self, x: F64, index: int, watch: Watch) -> None:
        """Block `index` without embedding; `x` in place."""
        model, width = self._model, self._model.intermediate_size
        normed = self._norm(x, index, "norm_attention")
        watch("qkv", normed)
        mixed = self._attention(self._product(normed, index, "qkv"), index)
        watch("o", mixed)
        x += self._product(mixed, index, "o")
        normed = self._norm(x, index, "norm_mlp")
        watch("gate_up", normed)
        gate_up = self._product(normed, index, "gate_up")
        gate = gate_up[:, :width]
        with np.errstate(over="ignore"):  # exp of a large negative gate: the quotient is 0, as it should be
            inner = gate / (1 + np.exp(-gate)) * gate_up[:, width:]
        watch("down", inner)
        x += self._product(inner, index, "down")
        assert x.shape[1] == model.hidden_size

    def head(self, x: F64, watch: Watch) -> None:
        """Shows the input of the head; its output is of no use to calibration."""
        watch("head", self._norm(x, self._model.blocks, "norm_final"))

    def logits(self, x: F64) -> F64:
        """[rows, vocab], for tests: all of it in memory."""
        return self._product(self._norm(x, self._model.blocks, "norm_final"), self._model.blocks, "head")

    def _norm(self, x: F64, index: int, name: str) -> F64:
        return self._normed(x, self._source.whole(index, name))

    def _normed(self, x: F64, weight: NDArray[np.float32]) -> F64:
        return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + self._model.rms_norm_eps) * weight

    def _product(self, x: F64, index: int, linear: str) -> F64:
        out = np.empty((x.shape[0], self._model.linear_shape(linear)[1]))
        for columns, weights in self._source.chunks(index, linear):
            out[:, columns] = x @ weights.astype(np.float64).T
        return out

    def _attention(self, qkv: F64, index: int) -> F64:
        """[S * L, (Hq + 2 Hkv) D] -> [S * L, Hq D]: bias, head norms, rotation, causal softmax."""
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
        """x [S, heads, L, D]; pairs (d, d + D/2)."""
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * self._cos - second * self._sin, second * self._cos + first * self._sin], axis=-1)
