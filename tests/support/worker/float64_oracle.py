"""The logits of a block folder in float64, straight from the formulas: what executors that are not exact come close to.

Weights are those of the folder, of any precision, widened; rows are never quantised.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.model import GROUP, ModelConfig, hadamard_size
from tests.support.models.hadamard import hadamard

F64 = NDArray[np.float64]


def oracle_logits(folder: BlockFolder, tokens: Sequence[int]) -> F64:
    """[len(tokens), vocab], of one text."""
    model = folder.model
    cos, sin = (table[: len(tokens), None].astype(np.float64) for table in folder.rotary())
    x: F64 = folder.tensors(1)["embedding"][list(tokens)].astype(np.float64)
    for block in range(1, model.blocks):
        tensors = folder.tensors(block)
        x = x + _attention(model, tensors, _norm(model, x, tensors["norm_attention"]), cos, sin)
        gate_up = _norm(model, x, tensors["norm_mlp"]) @ weight(tensors, "gate_up")
        gate, up = np.split(gate_up, 2, axis=1)
        inner = gate / (1 + np.exp(-gate)) * up
        if size := hadamard_size(model, folder.manifest.precision_of(block)):
            inner = (inner.reshape(-1, size) @ hadamard(size)).reshape(inner.shape)
        x = x + inner @ weight(tensors, "down")
    tensors = folder.tensors(model.blocks)
    return _norm(model, x, tensors["norm_final"]) @ weight(tensors, "head")


def weight(tensors: Mapping[str, NDArray[Any]], kind: str) -> F64:
    """What a linear layer multiplies by, [K, N]: see `block_tensors`."""
    if f"{kind}.w" in tensors:
        return tensors[f"{kind}.w"].astype(np.float64)
    if f"{kind}.q" in tensors:
        return tensors[f"{kind}.q"].astype(np.float64) * tensors[f"{kind}.scale"].astype(np.float64)
    packed, scales, minimums = (tensors[f"{kind}.{part}"] for part in ("q4", "gs", "gm"))
    found = np.empty((2 * packed.shape[0], packed.shape[1]))
    for k in range(found.shape[0]):
        nibbles = packed[k // 2] >> (4 * (k % 2)) & 15
        found[k] = nibbles * scales[k // GROUP].astype(np.float64) + minimums[k // GROUP]
    return found


def _norm(model: ModelConfig, x: F64, gain: NDArray[np.float32]) -> F64:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + model.rms_norm_eps) * gain


def _attention(model: ModelConfig, tensors: Mapping[str, NDArray[Any]], x: F64, cos: F64, sin: F64) -> F64:
    """Causal, of all rows at once; the query heads come in groups with a key head each."""
    rows, dim = x.shape[0], model.head_dim
    qkv = x @ weight(tensors, "qkv")
    if model.qkv_bias:
        qkv = qkv + tensors["qkv.bias"]
    queries, keys, values = model.heads * dim, model.kv_heads * dim, model.kv_heads * dim
    q, k, v = (part.reshape(rows, -1, dim) for part in np.split(qkv, [queries, queries + keys], axis=1))
    assert v.shape[1] * dim == values
    if model.qk_norm:
        q, k = _norm(model, q, tensors["norm_q"]), _norm(model, k, tensors["norm_k"])
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    group = model.heads // model.kv_heads
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, axis=1)) * dim**-0.5
    scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", shares, np.repeat(v, group, axis=1))
    return mixed.reshape(rows, queries) @ weight(tensors, "o")


def _rotated(x: F64, cos: F64, sin: F64) -> F64:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
