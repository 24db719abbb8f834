"""KV in tensor steps: the KV that a client sends with a step, and the KV that it wants in the answer. Pure.

Names are those of exported decoders: `past_key_values.3.key` comes in, `present.3.key` goes out, with the shape [rows,
kv_heads, positions, head_dim]. Layers are counted from 0.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as field_of
from itertools import accumulate
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.precisions import kv_item_bytes
from blockrelay.errors import BadRequest
from blockrelay.onnx_blocks.cache_names import CacheSlot, Half, slot_named
from blockrelay.protocol.constants import PAGE_TOKENS
from blockrelay.protocol.encoding.kv_pages import KvShape, field
from blockrelay.protocol.tensors import decode_tensor
from blockrelay_gateway.policy import MAX_KV_BYTES

_BLOCKS = re.compile(r"([1-9]\d{0,5})(?:-([1-9]\d{0,5}))?", re.ASCII)
HALVES: tuple[Half, ...] = get_args(Half)


@dataclass(frozen=True, slots=True)
class ServedKv:
    """The KV of the served model: the shape of one layer's KV, and the layers of each block in `blocks`."""

    shape: KvShape
    blocks: tuple[tuple[int, ...], ...]

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return sum(map(len, self.blocks))


@dataclass(frozen=True, slots=True, eq=False)
class GivenKv:
    """KV that a client sent: of the first `tokens` positions of each row, in all layers."""

    tokens: int
    pages: tuple[Mapping[str, bytes], ...]
    """The full KV pages of each row, by their field in Redis, `<page>.<layer>`."""
    digest: str
    """SHA-256 of all the KV, in hex."""

    @property
    def whole(self) -> int:
        """Number of positions in full pages."""
        return self.tokens // PAGE_TOKENS * PAGE_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class RowKv:
    """The KV of one row that a client sends, and the KV that it asks for."""

    given: Mapping[str, bytes] = field_of(default_factory=dict[str, bytes])
    """KV pages that the client sent, by their field in Redis: of the first `given_tokens` positions."""
    given_tokens: int = 0
    wanted_layers: tuple[int, ...] = ()
    """Layers whose KV the answer has."""
    bytes: int = 0
    """Bytes that both take of the payload Redis."""


def served_kv(folder: BlockFolder) -> ServedKv:
    """Returns the shape and layers of the KV of the model in `folder`."""
    model = folder.model
    dtype = np.float16 if kv_item_bytes(folder.manifest.precisions) == 2 else np.float32
    shape = KvShape(model.kv_heads, model.head_dim, dtype)
    if model.onnx_layers is None:
        return ServedKv(shape, (*((layer,) for layer in range(model.layers)), ()))
    ends = accumulate(model.onnx_layers)
    return ServedKv(
        shape, tuple(tuple(range(end - has, end)) for end, has in zip(ends, model.onnx_layers, strict=True))
    )


def layers_of_blocks(served: ServedKv, blocks: str | None) -> tuple[int, ...]:
    """The layers of the blocks that a client names, `3` or `2-5`; none for None.

    Blocks count from 1. Raises BadRequest for other texts, blocks that the model does not have, and blocks that have no
    layer among them.
    """
    if blocks is None:
        return ()
    match, last = _BLOCKS.fullmatch(blocks), len(served.blocks)
    first, end = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if not 1 <= first <= end <= last:
        message = f"blocks must be a block, or the first and the last of several as in 1-{last}, not {blocks!r:.40}"
        raise BadRequest(f"{message}; the model has block_1 to block_{last}", param="blocks")
    layers = tuple(layer for block in served.blocks[first - 1 : end] for layer in block)
    if not layers:
        raise BadRequest(f"block_{first} has no layer, and so no KV", param="blocks")
    return layers


def fields_of(layers: Sequence[int], tokens: int) -> list[str]:
    """The Redis hash fields of the KV pages of a row with `tokens` tokens, layer after layer."""
    return [field(page, layer) for layer in layers for page in range(-(-tokens // PAGE_TOKENS))]


def split_tensors(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[CacheSlot, Any]]:
    """Splits the undecoded tensors of a step into those of its tokens, by name, and those of KV, by layer and half.

    Raises BadRequest for KV that is sent twice.
    """
    others: dict[str, Any] = {}
    past: dict[CacheSlot, Any] = {}
    for name, tensor in tensors.items():
        slot = slot_named(name, "past")
        if slot is None:
            others[name] = tensor
        elif slot in past:
            raise BadRequest(f"input_tensors has {slot} twice", param=f"input_tensors.{name}")
        else:
            past[slot] = tensor
    return others, past


def read_given(served: ServedKv, past: Mapping[CacheSlot, Any], *, rows: int, context: int) -> GivenKv | None:
    """Decodes the KV tensors in `past` into full pages; None if there are none.

    `rows` is the number of rows of the step, `context` the model's number of positions. Positions behind the last full
    page count in `tokens` and in the digest, but are in no page. All layers must be there with the same number of
    positions: tokens pass through all layers, so what one layer lacks would have to be computed from the first layer
    on. Raises BadRequest naming the tensor, also for another dtype and for numbers that are not finite.
    """
    if not past:
        return None
    shape = served.shape
    for slot in past:
        if slot.layer >= served.layers:
            raise BadRequest(
                f"the model has layers 0 to {served.layers - 1}, not {slot.layer}", param=_param(slot.layer, slot.half)
            )
    arrays: dict[CacheSlot, NDArray[Any]] = {}
    positions = 0
    for layer in range(served.layers):
        for half in HALVES:
            slot, param = CacheSlot(layer, half), _param(layer, half)
            if slot not in past:
                message = f"{param} is missing: KV is given for all layers, which may come from several answers"
                raise BadRequest(message, param=param)
            max_elements = rows * shape.kv_heads * context * shape.head_dim
            array = decode_tensor(past[slot], param=param, max_elements=max_elements)
            positions = positions or (array.shape[2] if array.ndim == 4 else 0)
            expected = (rows, shape.kv_heads, positions, shape.head_dim)
            if not positions or array.shape != expected or array.dtype != shape.dtype:
                dims = [*expected[:2], positions or "positions", expected[3]]
                message = f"{param} must be {np.dtype(shape.dtype).name} {dims}"
                raise BadRequest(f"{message}, not {array.dtype.name} {list(array.shape)}", param=param)
            if not np.isfinite(array).all():
                raise BadRequest(f"{param} has a number that is not finite", param=param)
            arrays[slot] = array
    digest = hashlib.sha256()
    for array in arrays.values():
        digest.update(array.tobytes())
    pages = tuple(dict(_row_pages(shape, arrays, served.layers, row)) for row in range(rows))
    return GivenKv(positions, pages, digest.hexdigest())


def check_kv_lengths(
    lengths: Sequence[int], served: ServedKv, *, given: GivenKv | None, wanted_layers: Sequence[int]
) -> None:
    """Raises BadRequest if rows cannot have the KV that is sent and asked for.

    `lengths` has the number of tokens of each row after the step, with those of earlier steps. KV needs rows of one
    length, at least one token behind the KV that is sent, and at most MAX_KV_BYTES in the answer.
    """
    if (given or wanted_layers) and len(set(lengths)) > 1:
        raise BadRequest("rows of one length only have KV in common: send them without padding", param="input_tensors")
    if given is not None and given.tokens >= lengths[0]:
        raise BadRequest(
            f"KV of {given.tokens} positions is given, and input_ids and the steps before have {lengths[0]}: send the "
            "tokens of those positions too, which decide what KV is, and at least one behind them",
            param="input_tensors.input_ids",
        )
    each = len(wanted_layers) * served.shape.token_bytes
    if each * sum(lengths) > MAX_KV_BYTES:
        message = f"the KV of these blocks is at most that of {MAX_KV_BYTES // each} tokens, not {sum(lengths)}"
        raise BadRequest(f"{message}: ask for fewer blocks at a time", param="blocks")


def row_kv(served: ServedKv, row: int, tokens: int, *, given: GivenKv | None, wanted_layers: tuple[int, ...]) -> RowKv:
    """The KV that is sent and asked for of the row number `row`, which has `tokens` tokens after the step."""
    taken = len(fields_of(wanted_layers, tokens)) * 2 * served.shape.half_bytes
    if given is None:
        return RowKv(wanted_layers=wanted_layers, bytes=taken)
    pages = given.pages[row]
    return RowKv(pages, given.whole, wanted_layers, taken + sum(map(len, pages.values())))


def _row_pages(
    shape: KvShape, arrays: Mapping[CacheSlot, NDArray[Any]], layers: int, row: int
) -> Iterator[tuple[str, bytes]]:
    for layer in range(layers):
        keys, values = (arrays[CacheSlot(layer, half)][row] for half in HALVES)
        for page, content in enumerate(shape.to_pages(keys, values)):
            yield field(page, layer), content


def kv_tensors(
    shape: KvShape, layers: Sequence[int], rows: Sequence[list[bytes]], tokens: int
) -> dict[str, NDArray[Any]]:
    """Builds `present.<layer>.key` and `.value`, [rows, kv_heads, tokens, head_dim], from each row's KV pages.

    `rows` has the pages in the order of `fields_of`; they are replaced by b"" layer after layer, to free their memory.
    Raises WireError for pages of another size.
    """
    tensors: dict[str, NDArray[Any]] = {}
    each = -(-tokens // PAGE_TOKENS)
    for index, layer in enumerate(layers):
        its = slice(index * each, (index + 1) * each)
        halves = [shape.from_pages(pages[its], tokens) for pages in rows]
        for pages in rows:
            pages[its] = [b""] * each
        for number, half in enumerate(HALVES):
            tensors[f"present.{layer}.{half}"] = np.stack([both[number] for both in halves])
    return tensors


def _param(layer: int, half: str) -> str:
    return f"input_tensors.past_key_values.{layer}.{half}"
