"""Rotates the residual stream of a model: the same function, whose activations are easier to round (QuaRot).

In trained models a few channels of the residual stream are much larger than the others and decide the step in which a
row is rounded. An orthogonal matrix Q mixes all channels. Embeddings become E Q, layers that write to the stream
Q^T W, and those that read it W diag(norm) Q, with the weights of the norms behind which they stand; the norms become
ones. Queries, keys, values and the MLP's inner activations stay as they are. Source: arXiv 2404.00456.

Q = diag(signs) (H x S) / sqrt(size): the Kronecker product of a Hadamard matrix H of the largest power of two that
divides the width, and a fixed small orthogonal matrix S of the rest. It depends on the width alone. All arithmetic is
element by element, in one order, without BLAS or LAPACK, so that every machine writes the same folder.
"""

import os
import tempfile
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import ModelConfig
from blockrelay_converter.quantisation.hadamard import transform
from blockrelay_converter.weight_source import F32, Groups, SourceTensor, WeightSource

#: The norm before each linear layer that reads the residual stream, both by the ends of their names.
_NORMS = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
#: Linear layers that write to the residual stream.
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")
_EMBEDDING, _HEAD, _FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
#: Values rotated at a time when columns are: 4 MiB of float32.
_CHUNK_VALUES = 1 << 20


def rotate(rows: F32) -> F32:
    """Returns Q^T `rows`, float32 [H, N]: columns are vectors of the residual stream, or weights that read one."""
    width, count = rows.shape
    size = width & -width
    rest = width // size
    rotated = np.multiply(rows, _signs(width)[:, None], order="C")
    transform(rotated.reshape(size, rest * count), size)
    if rest == 1:
        return rotated
    small, parts = _small_matrix(rest), rotated.reshape(size, rest, count)
    mixed = np.zeros_like(parts)
    for source in range(rest):
        for target in range(rest):
            mixed[:, target] += parts[:, source] * small[source, target]
    return mixed.reshape(width, count)


@cache
def _signs(width: int) -> F32:
    """Returns the signs of the channels over sqrt(size), as `rotate` needs them."""
    signs = np.where(_hashes(width) >> np.uint64(31), np.float32(-1), np.float32(1))
    return signs * np.float32(np.sqrt(1 / (width & -width)))


@cache
def _small_matrix(width: int) -> F32:
    """Returns a dense orthogonal matrix: the product of reflections at fixed vectors of small odd numbers."""
    matrix = np.eye(width)
    vectors = (_hashes(width * width) >> np.uint64(28)).astype(np.float64).reshape(width, width) * 2 - 15
    for vector in vectors:
        along, square = np.zeros(width), 0.0
        for index, value in enumerate(vector.tolist()):  # in order: a library's sum may have another one
            along += matrix[:, index] * value
            square += value * value
        matrix -= along[:, None] * (vector * (2 / square))
    return matrix.astype(np.float32)


def _hashes(count: int) -> NDArray[np.uint64]:
    """Returns `count` well mixed numbers of 32 bits that are the same everywhere (the finaliser of MurmurHash3)."""
    mask = np.uint64(0xFFFFFFFF)
    x = np.arange(1, count + 1, dtype=np.uint64)
    for factor, shift in ((0x9E3779B1, 16), (0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        x = x * np.uint64(factor) & mask
        x ^= x >> np.uint64(shift)
    return x


class RotatedWeights:
    """The weights of a model in the rotated basis. Implements `weight_source.WeightSource`.

    A model with tied embeddings gets a head of its own: the head has the final norm's weights in it.
    """

    def __init__(self, weights: WeightSource, model: ModelConfig, *, tied: bool, scratch: Path) -> None:
        """`tied`: the head is the embedding. `scratch` is a folder for one matrix at a time, with room for it in
        float32; it need not exist until values are read, and nothing stays there."""
        self._weights, self._tied, self._scratch = weights, tied, scratch
        self._hidden = model.hidden_size

    def names(self) -> AbstractSet[str]:
        """Returns the names of all tensors; the head is always one of them."""
        return self._weights.names() | {_HEAD}

    def tensor(self, name: str, shape: tuple[int, ...]) -> SourceTensor:
        """Returns the tensor `name`. Raises what the original weights raise."""
        source = self._weights.tensor(_EMBEDDING if self._tied and name == _HEAD else name, shape)
        if name == _EMBEDDING:
            return _Readers(source, None)
        if name == _HEAD:
            return _Readers(source, self._norm(_FINAL_NORM))
        layer, _, kind = name.removesuffix(".weight").rpartition("layers.")[2].partition(".")
        if name == _FINAL_NORM or kind in _NORMS.values():
            return _Ones(source)
        if kind in _WRITERS:
            return _Writer(source, self._scratch)
        if kind in _NORMS and name.endswith(".weight"):
            return _Readers(source, self._norm(f"model.layers.{layer}.{_NORMS[kind]}.weight"))
        return source

    def _norm(self, name: str) -> SourceTensor:
        return self._weights.tensor(name, (self._hidden,))


class _Rotated:
    """A tensor that is made of another one. Implements `weight_source.SourceTensor` but for `rows`."""

    def __init__(self, source: SourceTensor) -> None:
        self._source = source

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._source.shape

    def groups(self, start: int, stop: int) -> Groups | None:
        """Returns None: rotated weights are on no grid of 4 bits."""
        return None

    def forget(self) -> None:
        """Releases memory; the tensor may be read again."""
        self._source.forget()


class _Ones(_Rotated):
    """The weights of a norm, which have moved into the linear layers behind it."""

    def rows(self, start: int, stop: int) -> F32:
        return np.ones(stop - start, np.float32)


class _Readers(_Rotated):
    """Rows that are multiplied with vectors of the residual stream, or are such vectors: [N, H]."""

    def __init__(self, source: SourceTensor, norm: SourceTensor | None) -> None:
        """`norm` is the norm before them, whose weights they get."""
        super().__init__(source)
        self._norm = norm

    def rows(self, start: int, stop: int) -> F32:
        """Returns rows `start` to `stop - 1`. Raises the source's error for a value that is not finite."""
        rows = self._source.rows(start, stop)
        if self._norm is not None:
            rows = rows * self._norm.rows(0, self.shape[1])
        return rotate(np.ascontiguousarray(rows.T)).T


class _Writer(_Rotated):
    """A linear layer whose outputs are added to the residual stream: [H, N]."""

    def __init__(self, source: SourceTensor, scratch: Path) -> None:
        super().__init__(source)
        self._scratch = scratch
        self._matrix: F32 | None = None

    def rows(self, start: int, stop: int) -> F32:
        """Returns rows `start` to `stop - 1`. Raises the source's error for a value that is not finite.

        The first call reads the whole matrix and rotates it, in a file: each row depends on all others.
        """
        if self._matrix is None:
            self._matrix = self._rotated()
        return self._matrix[start:stop].copy()

    def forget(self) -> None:
        """Removes the file; the tensor may be read again."""
        self._matrix = None
        super().forget()

    def _rotated(self) -> F32:
        height, width = self.shape
        with tempfile.TemporaryFile(dir=self._scratch) as file:
            # A full disk must be an error here; through the mapping it would be a SIGBUS.
            os.posix_fallocate(file.fileno(), 0, 4 * height * width)
            matrix: F32 = np.memmap(file, np.float32, "r+", shape=(height, width))
        lines = max(1, _CHUNK_VALUES // width)
        for start in range(0, height, lines):
            matrix[start : start + lines] = self._source.rows(start, min(start + lines, height))
        columns = max(1, _CHUNK_VALUES // height)
        for start in range(0, width, columns):
            part = matrix[:, start : start + columns]
            part[...] = rotate(np.ascontiguousarray(part))
        return matrix
