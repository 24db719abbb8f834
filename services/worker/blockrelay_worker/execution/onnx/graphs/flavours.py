"""The flavours of a stage's graph: how it attends, and by floats of which type it computes.

    plain  standard operators, which every provider has, in float32
    paged  `com.microsoft.PagedAttention`, in float16: faster the longer the context, where a provider has it

Pure.
"""

from dataclasses import dataclass
from typing import Literal

FloatType = Literal["float32", "float16"]


@dataclass(frozen=True, slots=True)
class Flavour:
    """`version` changes with anything in its graphs that can change a bit."""

    name: Literal["plain", "paged"]
    dtype: FloatType
    version: int


PLAIN = Flavour("plain", "float32", 1)
PAGED = Flavour("paged", "float16", 1)


def flavour_for(*, narrow: bool, has_paged_attention: bool, has_float16: bool) -> Flavour:
    """Of a model whose keys and values are float16 (`narrow`: every precision but fp32), on a device whose provider has
    the operator, and which computes in float16."""
    return PAGED if narrow and has_paged_attention and has_float16 else PLAIN
