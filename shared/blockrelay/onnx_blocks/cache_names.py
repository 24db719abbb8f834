"""Recognises tensors that are a session's KV by the names that exporters give them.

A past is the KV of the steps before, an input; a present is that with the new tokens, an output. Names:
`past_key_values.0.key` (optimum, onnxruntime-genai), `past_key_values_key_0`, `past_key_values_0_key`,
`past_key_values.key_cache_0` (torch), and `present...` alike. A cache has four dimensions, one of them positions.
"""

import re
from dataclasses import dataclass
from typing import Literal

from blockrelay.errors import OnnxBlocksError
from blockrelay.onnx_blocks.signature import Tensor

Half = Literal["key", "value"]
Role = Literal["past", "present"]
_RANK = 4
_NAME = re.compile(
    r"(?P<role>past|present)(?:_key_values)?[._]"
    r"(?:(?P<layer>\d{1,6})[._](?P<half>key|value)(?:_cache|s)?|(?P<half_first>key|value)(?:_cache|s)?[._](?P<layer_last>\d{1,6}))",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, order=True)
class CacheSlot:
    """The keys or the values of one layer. Layers are counted from 0, as exporters do."""

    layer: int
    half: Half

    def __str__(self) -> str:
        return f"the {self.half}s of layer {self.layer}"


def slot_named(name: str, role: Role) -> CacheSlot | None:
    """Returns the slot whose past (or present, by `role`) is called `name`; None if no cache is called so."""
    match = _NAME.fullmatch(name)
    if match is None or match["role"] != role:
        return None
    half: Half = "key" if (match["half"] or match["half_first"]) == "key" else "value"
    return CacheSlot(int(match["layer"] or match["layer_last"]), half)


def cache_slot(tensor: Tensor, role: Role, *, file: str) -> CacheSlot | None:
    """Returns the slot whose past (or present, by `role`) is `tensor`; None if the tensor is no cache.

    Raises OnnxBlocksError, with `file`, for one that is called like a cache and declares another number of dimensions
    than four.
    """
    slot = slot_named(tensor.name, role)
    if slot is not None and tensor.rank not in (_RANK, None):
        raise OnnxBlocksError(
            f"is called like a cache and has {tensor.rank} dimensions instead of {_RANK}", file=file, tensor=tensor.name
        )
    return slot
