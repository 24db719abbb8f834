"""Writes the tensors of one block into its file, a few megabytes at a time.

Output is written through a mapping of the file, so that quantised columns go to their place without a second copy: the
private memory of a conversion is a handful of chunks, whatever the size of a layer.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.manifest import BlockSpec, TensorSpec, place_tensors
from blockrelay.block_folder.model import GROUP, ModelConfig, Precision, block_tensors, in_groups, ungroupable
from blockrelay.errors import UnsupportedModel, UsageError
from blockrelay_converter.quantisation.folding import NO_FOLDING, Folding
from blockrelay_converter.quantisation.groups import group_values, quantise_groups
from blockrelay_converter.weight_source import SourceTensor, WeightSource

_CHUNK_VALUES = 1 << 20
"""float32 values converted at a time (4 MiB); a few temporaries of this size exist at once."""

Progress = Callable[[int], None]
#: Ends the names of tensors of old exports that follow from config.json.
_LEFT_OVER = "rotary_emb.inv_freq"


class BlockSource:
    """Finds the tensors of every block, and has checked all of them before the first byte is written."""

    def __init__(
        self, weights: WeightSource, model: ModelConfig, precisions: Sequence[Precision], *, tied: bool
    ) -> None:
        """UsageError names a tensor that is missing or of the wrong shape, UnsupportedModel one we would ignore.

        UsageError, too, for a model whose widths the precision cannot hold.
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
        """The bytes of all tensors, which `write` reports piece by piece."""
        return sum(self.block_bytes(index) for index in range(1, self.model.blocks + 1))

    def block_bytes(self, index: int) -> int:
        """The bytes of the tensors of block `index`."""
        return sum(tensor.nbytes for tensor in self._place(index)[0].values())

    def chunks(self, index: int, name: str) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """Pieces of the first axis of a tensor of block `index` as the checkpoint has it: (place in the whole, values).

        `name` as in `block_tensors`, a linear by its kind alone (then the values are [outputs, inputs]).
        """
        for place, part, start, stop in self._pieces(index, name):
            yield place, part.rows(start, stop)

    def _pieces(self, index: int, name: str) -> Iterator[tuple[slice, SourceTensor, int, int]]:
        """(place in the whole, a tensor, rows of it from and to), of a few megabytes each."""
        base = 0
        for part in self._parts[index, name]:
            count = part.shape[0]
            step = max(1, _CHUNK_VALUES * count // math.prod(part.shape))
            for start in range(0, count, step):
                stop = min(start + step, count)
                yield slice(base + start, base + stop), part, start, stop
            base += count

    def whole(self, index: int, name: str) -> NDArray[np.float32]:
        """A small tensor (a norm, a bias) in one piece."""
        return np.concatenate([values for _, values in self.chunks(index, name)])

    def forget(self, index: int) -> None:
        """Give the memory behind the tensors of block `index` back; they may be read again."""
        for (block, _), parts in self._parts.items():
            if block == index:
                for part in parts:
                    part.forget()

    def embedding_rows(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """[tokens, hidden]."""
        (embedding,) = self._parts[1, "embedding"]
        return np.concatenate([embedding.rows(token, token + 1) for token in tokens.tolist()])

    def write(
        self, index: int, folder: Path, name: str, progress: Progress, folding: Folding = NO_FOLDING
    ) -> BlockSpec:
        """Write block `index` to the file `name` in `folder`, down to the disk. `progress` is told bytes.

        The file is there whole or not at all: what an earlier run has written of the same folder is left as it is.
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
                if part == "q":
                    self._quantise(index, stem, out[name], out[f"{stem}.scale"], progress, folding)
                elif part == "q4":
                    tensors = (out[name], out[f"{stem}.gs"], out[f"{stem}.scale"])
                    self._quantise_groups(index, stem, tensors, progress, folding)
                elif part == "w":
                    self._transpose(index, stem, out[name], progress, folding)
                elif part not in ("gs", "scale"):
                    self._copy(index, name, out[name], progress, folding)
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
        q: NDArray[np.int8],
        scale: NDArray[np.float32],
        progress: Progress,
        folding: Folding,
    ) -> None:
        for columns, weights in self.chunks(index, stem):
            q[:, columns], scale[columns] = quantise(folding.apply(stem, columns, weights))
            progress(weights.size + scale[columns].nbytes)

    def _quantise_groups(
        self, index: int, stem: str, out: tuple[NDArray[Any], ...], progress: Progress, folding: Folding
    ) -> None:
        for columns, source, start, stop in self._pieces(index, stem):
            found = source.groups(start, stop) if folding is NO_FOLDING else None
            if found is None:
                found = quantise_groups(folding.apply(stem, columns, source.rows(start, stop)))
            for tensor, part in zip(out, found, strict=True):
                tensor[..., columns] = part
                progress(part.nbytes)

    def _transpose(self, index: int, stem: str, out: NDArray[Any], progress: Progress, folding: Folding) -> None:
        for columns, weights in self.chunks(index, stem):
            self._check_range(index, stem, weights, out)
            out[:, columns] = folding.apply(stem, columns, weights).T
            progress(out[:, columns].nbytes)

    def _copy(self, index: int, name: str, out: NDArray[Any], progress: Progress, folding: Folding) -> None:
        for rows, values in self.chunks(index, name):
            self._check_range(index, name, values, out)
            out[rows] = folding.apply(name, rows, values)
            progress(out[rows].nbytes)

    def _check_range(self, index: int, name: str, values: NDArray[np.float32], out: NDArray[Any]) -> None:
        if out.dtype == np.float16 and np.abs(values).max(initial=0) > np.finfo(np.float16).max:
            source = self._parts[index, name][0].name
            raise UsageError(f"tensor {source} holds values beyond float16; convert with --precision fp32")


def quantise(weights: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """float32 [N, K] rows of a linear layer to its columns: int8 [K, N] and their scales float32 [N].

    scale = max|w| / 127, or 1 for an all-zero column; q = round to even(w / scale), each step in float32.
    """
    scale = np.abs(weights).max(axis=1) / np.float32(127.0)
    scale[scale == 0] = 1.0
    q = np.rint(weights / scale[:, None]).clip(-127, 127).astype(np.int8)
    return q.T, scale


def rounded(precision: Precision, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 [N, K] rows of a linear layer as a folder that rounds its rows holds them."""
    if in_groups(precision):
        return group_values(*quantise_groups(weights))
    q, scale = quantise(weights)
    return q.T * scale[:, None]


def _source_tensors(model: ModelConfig, index: int, *, tied: bool) -> dict[str, dict[str, tuple[int, ...]]]:
    """Tensor of block `index` (a linear by its kind) -> checkpoint tensors to concatenate -> their shapes."""
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
