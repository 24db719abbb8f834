"""Writes the tensors of one block into its file, a few megabytes at a time.

The output file is memory-mapped, so that quantised columns go to their place without a second copy. The private memory
of a conversion without calibration is a handful of chunks, whatever the size of a layer.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.manifest import BlockSpec, TensorSpec, place_tensors
from blockrelay.block_folder.model import (
    GROUP,
    ModelConfig,
    Precision,
    block_tensors,
    hadamard_size,
    in_groups,
    ungroupable,
)
from blockrelay.errors import UnsupportedModel, UsageError
from blockrelay_converter.quantisation.columns import quantise_columns
from blockrelay_converter.quantisation.grids import mostly_on_grid
from blockrelay_converter.quantisation.groups import group_values, quantise_groups
from blockrelay_converter.quantisation.hadamard import spread_inputs
from blockrelay_converter.quantisation.smoothing_scales import NO_SMOOTHING, Smoothing
from blockrelay_converter.weight_source import F64, SourceTensor, WeightSource

_CHUNK_VALUES = 1 << 20
"""float32 values converted at a time (4 MiB); a few temporaries of this size exist at once."""
_FEWEST_ROWS = 256
"""Rows that are rounded together with calibration, at least: the time for an input hardly depends on their number."""

Progress = Callable[[int], None]
"""A function that is called with the number of tensor bytes written since its last call."""
NO_FEEDBACK: Mapping[str, Sequence[F64]] = MappingProxyType({})
"""The feedback of a conversion without calibration: no linear layer has any."""
#: Suffix of tensors that old exports hold and that config.json determines anyway: they are ignored.
_LEFT_OVER = "rotary_emb.inv_freq"


class BlockSource:
    """The tensors of every block of a model, read from its weights and written as a block folder holds them.

    Names and shapes of all tensors are checked when the object is made, before the first byte is written. Blocks are
    numbered from 1. Methods that read values raise UsageError, or OnnxBlocksError from ONNX blocks, for a value that is
    not finite.
    """

    def __init__(
        self, weights: WeightSource, model: ModelConfig, precisions: Sequence[Precision], *, tied: bool
    ) -> None:
        """Finds all tensors; `precisions` has one entry per block, `tied` means that the head is the embedding.

        Raises UsageError for widths that a precision cannot hold. Raises UsageError (OnnxBlocksError from ONNX blocks)
        for a tensor that is missing, damaged or of the wrong shape. Raises UnsupportedModel for a tensor that would be
        ignored, and for one of a type that cannot be converted.
        """
        if (odd := ungroupable(model, precisions)) is not None:
            precision, kind = odd
            inputs = model.linear_shape(kind)[0]
            raise UsageError(f"{precision} needs inputs in multiples of {GROUP}, and {kind} has {inputs}; use w8a8")
        self.model = model
        self.precisions = tuple(precisions)
        self._parts: dict[tuple[int, str], list[SourceTensor]] = {}
        used: set[str] = set()
        for index in range(1, model.blocks + 1):
            for name, shapes in _source_tensors(model, index, tied=tied).items():
                self._parts[index, name] = [weights.tensor(source, shape) for source, shape in shapes.items()]
                used |= shapes.keys()
        for name in sorted(weights.names() - used):
            if not (name.endswith(_LEFT_OVER) or (tied and name == "lm_head.weight")):
                raise UnsupportedModel(f"tensor {name} is not part of a {model.family} model we know", field=name)

    def total_bytes(self) -> int:
        """The bytes of all tensors of all blocks; the calls of `write` report as many in sum."""
        return sum(self.block_bytes(index) for index in range(1, self.model.blocks + 1))

    def block_bytes(self, index: int) -> int:
        """The bytes of the tensors of block `index`."""
        return sum(tensor.nbytes for tensor in self._place(index)[0].values())

    def chunks(self, index: int, name: str) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """Yields a tensor of block `index` in pieces along its first axis: (slice of the whole, float32 values).

        `name` is the kind of a linear layer (`qkv`; values are [outputs, inputs]), or the name that `block_tensors` has
        for another tensor (`norm_mlp`).
        """
        for place, part, start, stop in self._pieces(index, name):
            yield place, part.rows(start, stop)

    def _pieces(self, index: int, name: str, least: int = 1) -> Iterator[tuple[slice, SourceTensor, int, int]]:
        """Yields (slice of the whole, source tensor, its first row, its last row + 1), a few megabytes each.

        A piece has at least `least` rows, as far as the tensor has them.
        """
        base = 0
        for part in self._parts[index, name]:
            count = part.shape[0]
            step = max(least, _CHUNK_VALUES * count // math.prod(part.shape))
            for start in range(0, count, step):
                stop = min(start + step, count)
                yield slice(base + start, base + stop), part, start, stop
            base += count

    def whole(self, index: int, name: str) -> NDArray[np.float32]:
        """Returns a small tensor (a norm, a bias) in one piece."""
        return np.concatenate([values for _, values in self.chunks(index, name)])

    def on_grid(self) -> bool:
        """True if most weights, as far as the first ones of block 1 tell, have 4 bits already."""
        _, weights = next(self.chunks(1, "gate_up"))
        return mostly_on_grid(weights)

    def forget(self, index: int) -> None:
        """Releases the memory of the tensors of block `index`; they may be read again."""
        for (block, _), parts in self._parts.items():
            if block == index:
                for part in parts:
                    part.forget()

    def embedding_rows(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the embeddings of `tokens` [n], float32 [n, hidden]; at least one token, all in the vocabulary."""
        (embedding,) = self._parts[1, "embedding"]
        return np.concatenate([embedding.rows(token, token + 1) for token in tokens.tolist()])

    def write(
        self,
        index: int,
        folder: Path,
        name: str,
        progress: Progress,
        smoothing: Smoothing = NO_SMOOTHING,
        feedback: Mapping[str, Sequence[F64]] = NO_FEEDBACK,
    ) -> BlockSpec:
        """Applies `smoothing` to block `index` and writes it to the file `name` in `folder`, synced to disk.

        `feedback` has, by the kind of a linear layer, how its weights make up for errors (`gptq.feedback_of`).
        The file is written under another name and then renamed, so it is complete or absent; its folder must exist. A
        file that is there already is kept unread: it must be from an interrupted run with the same arguments, weights
        and precision. Raises UsageError for a value that does not fit float16, UsageError or OnnxBlocksError for one
        that is not finite, and OSError if the disk is full.
        """
        tensors, size = self._place(index)
        spec = BlockSpec(index=index, file=name, tensors=tensors)
        target = folder / name
        if target.exists():
            progress(self.block_bytes(index))
            return spec
        partial = target.with_name(f"{target.name}.partial")
        with partial.open("wb+") as file:
            # A full disk must be an error here; through the mapping it would be a SIGBUS.
            os.posix_fallocate(file.fileno(), 0, size)
            mapped = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))
            out = {
                name: mapped[tensor.offset : tensor.offset + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
                for name, tensor in spec.tensors.items()
            }
            for name in out:
                stem, _, part = name.partition(".")
                if part in ("q", "q4"):
                    tensors = [out[f"{stem}.{each}"] for each in (part, "gs", "gm", "scale") if f"{stem}.{each}" in out]
                    self._quantise(index, stem, tensors, progress, smoothing, feedback.get(stem, ()))
                elif part == "w":  # a linear layer in floats, [inputs, outputs]
                    self._copy(index, stem, out[name].T, progress, smoothing)
                elif part not in ("gs", "gm", "scale"):
                    self._copy(index, name, out[name], progress, smoothing)
            mapped.flush()
            os.fsync(file.fileno())
        partial.rename(target)
        self.forget(index)
        return spec

    def _place(self, index: int) -> tuple[dict[str, TensorSpec], int]:
        return place_tensors(block_tensors(self.model, self.precisions[index - 1], index))

    def _quantise(
        self,
        index: int,
        stem: str,
        out: Sequence[NDArray[Any]],
        progress: Progress,
        smoothing: Smoothing,
        feedback: Sequence[F64],
    ) -> None:
        """Writes a linear layer to the tensors `out`: its integers, its scales, and groups' minimums (w4a8)."""
        precision = self.precisions[index - 1]
        grouped = in_groups(precision)
        spread = hadamard_size(self.model, precision) if stem == "down" else 0
        for columns, source, start, stop in self._pieces(index, stem, least=_FEWEST_ROWS if feedback else 1):
            parts = source.groups(start, stop) if grouped and smoothing is NO_SMOOTHING else None
            if parts is None:
                weights = smoothing.apply(stem, columns, source.rows(start, stop))
                weights = spread_inputs(weights, spread) if spread else weights
                _check_range(source.name, weights, out[-1])
                parts = quantise_groups(weights, feedback) if grouped else quantise_columns(weights, feedback)
            for tensor, part in zip(out, parts, strict=True):
                tensor[..., columns] = part
            progress(sum(part.nbytes for part in parts))

    def _copy(self, index: int, name: str, out: NDArray[Any], progress: Progress, smoothing: Smoothing) -> None:
        for rows, values in self.chunks(index, name):
            _check_range(self._parts[index, name][0].name, values, out)
            out[rows] = smoothing.apply(name, rows, values)
            progress(out[rows].nbytes)


def source_digest(weights: WeightSource, model: ModelConfig, index: int, *, tied: bool) -> str:
    """Returns the SHA-256 (hex) of the tensors of a checkpoint that block `index` is made of, as float32.

    `weights` are not rotated. Raises what they raise.
    """
    digest = hashlib.sha256()
    for name, shapes in _source_tensors(model, index, tied=tied).items():
        for source, shape in shapes.items():
            digest.update(f"{name} {list(shape)}\n".encode())
            tensor = weights.tensor(source, shape)
            step = max(1, _CHUNK_VALUES * shape[0] // math.prod(shape))
            for start in range(0, shape[0], step):
                digest.update(tensor.rows(start, min(start + step, shape[0])).astype("<f4").tobytes())
            tensor.forget()
    return digest.hexdigest()


def _check_range(source: str, values: NDArray[np.float32], out: NDArray[Any]) -> None:
    """Raises UsageError that names the tensor `source` if `out` is float16 and cannot hold its `values`."""
    if out.dtype == np.float16 and np.abs(values).max(initial=0) > np.finfo(np.float16).max:
        raise UsageError(f"tensor {source} holds values beyond float16; convert with --precision fp32")


def rounded(precision: Precision, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the rows of a linear layer, float32 [N, K], after rounding to `precision` (w8a8 or w4a8) and back.

    For w4a8, K must be a multiple of GROUP.
    """
    if in_groups(precision):
        return group_values(*quantise_groups(weights))
    q, scale = quantise_columns(weights)
    return q.T * scale[:, None]


def _source_tensors(model: ModelConfig, index: int, *, tied: bool) -> dict[str, dict[str, tuple[int, ...]]]:
    """Maps each tensor of block `index` (a linear layer by its kind) to the checkpoint tensors to concatenate for it.

    Each of these has its expected shape.
    """
    hidden, vocab, mlp = model.hidden_size, model.vocab_size, model.intermediate_size
    if index == model.blocks:
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return {"norm_final": {"model.norm.weight": (hidden,)}, "head": {head: (vocab, hidden)}}
    layer = f"model.layers.{index - 1}."
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    columns = {"q": query, "k": key, "v": key}
    sources: dict[str, dict[str, tuple[int, ...]]] = {
        "norm_attention": {f"{layer}input_layernorm.weight": (hidden,)},
        "qkv": {f"{layer}self_attn.{name}_proj.weight": (count, hidden) for name, count in columns.items()},
        "o": {f"{layer}self_attn.o_proj.weight": (hidden, query)},
        "norm_mlp": {f"{layer}post_attention_layernorm.weight": (hidden,)},
        "gate_up": {f"{layer}mlp.{name}_proj.weight": (mlp, hidden) for name in ("gate", "up")},
        "down": {f"{layer}mlp.down_proj.weight": (hidden, mlp)},
    }
    if index == 1:
        sources["embedding"] = {"model.embed_tokens.weight": (vocab, hidden)}
    if model.qkv_bias:
        sources["qkv.bias"] = {f"{layer}self_attn.{name}_proj.bias": (count,) for name, count in columns.items()}
    if model.qk_norm:
        sources["norm_q"] = {f"{layer}self_attn.q_norm.weight": (model.head_dim,)}
        sources["norm_k"] = {f"{layer}self_attn.k_norm.weight": (model.head_dim,)}
    return sources
