"""The flavours of a stage's graph: its attention operator and its float type.

    plain  standard operators, which every provider has, in float32
    paged  `com.microsoft.PagedAttention`, in float16: faster the longer the context, where a provider has it

Pure.
"""

from dataclasses import dataclass
from typing import Literal

FloatType = Literal["float32", "float16"]


@dataclass(frozen=True, slots=True)
class Flavour:
    """One flavour. `version` changes with anything in its graphs that can change a bit. `longest_sum`: a matmul with
    more inputs is computed in parts of at most this many, which are added in float32; None: in one piece."""

    name: Literal["plain", "paged"]
    dtype: FloatType
    version: int
    longest_sum: int | None = None


PLAIN = Flavour("plain", "float32", 3)
PAGED = Flavour("paged", "float16", 3)
#: For a provider that adds up in float16. The error of a sum grows with the root of its length: a row of a layer with
#: 8,192 inputs is off by 1.6 % of its length, in parts of 512 by 0.4 %.
PAGED_IN_PARTS = Flavour("paged", "float16", 4, longest_sum=512)
