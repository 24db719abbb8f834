"""Which tensors are a session's KV: the names that exporters give pasts and presents.

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
    """The keys or the values of one layer, as exporters count layers: from 0."""

    layer: int
    half: Half

    def __str__(self) -> str:
        return f"the {self.half}s of layer {self.layer}"


def slot_named(name: str, role: Role) -> CacheSlot | None:
    """What a tensor of this name is the past (or present) of; None for a name that no cache has."""
    found = _NAME.fullmatch(name)
    if found is None or found["role"] != role:
        return None
    half: Half = "key" if (found["half"] or found["half_first"]) == "key" else "value"
    return CacheSlot(int(found["layer"] or found["layer_last"]), half)


def cache_slot(tensor: Tensor, role: Role, *, file: str) -> CacheSlot | None:
    """What the tensor is the past (or present) of; None for one that is no cache.

    Raises OnnxBlocksError for one that is called like a cache and does not have its four dimensions.
    """
    found = slot_named(tensor.name, role)
    if found is not None and tensor.rank not in (_RANK, None):
        raise OnnxBlocksError(
            f"is called like a cache and has {tensor.rank} dimensions instead of {_RANK}", file=file, tensor=tensor.name
        )
    return found
