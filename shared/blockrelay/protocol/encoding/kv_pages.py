"""Converts KV that clients get or send between tensors in JSON and KV pages on the payload Redis. Pure.

A tensor of keys, or of values, is [kv_heads, positions, head_dim]. A page has 16 positions of one layer in the layout
of executors: keys [kv_heads, head_dim, 16], then values [kv_heads, 16, head_dim], raw and little-endian. Layers are
counted from 0, through all blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import WireError
from blockrelay.protocol.constants import PAGE_TOKENS


def field(page: int, layer: int) -> str:
    """Returns the field of a page of a layer in the hashes `kv-asked:<id>` and `kv-given:<id>`.

    Both are counted from 0: pages from the beginning of the request, layers through all blocks.
    """
    return f"{page}.{layer}"


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape and dtype of the keys and values of one layer."""

    kv_heads: int
    head_dim: int
    dtype: type[np.float16] | type[np.float32]

    @property
    def half_bytes(self) -> int:
        """Bytes of the keys of a page, and as many of its values."""
        return self.kv_heads * self.head_dim * PAGE_TOKENS * np.dtype(self.dtype).itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of the key and the value of one position."""
        return 2 * self.half_bytes // PAGE_TOKENS

    def arrays(self, keys: memoryview, values: memoryview) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns views of a page's bytes: keys [kv_heads, head_dim, 16] and values [kv_heads, 16, head_dim].

        `keys` and `values` have `half_bytes` each. NumPy raises ValueError for other sizes.
        """
        dtype = np.dtype(self.dtype).newbyteorder("<")
        return (
            np.frombuffer(keys, dtype).reshape(self.kv_heads, self.head_dim, PAGE_TOKENS),
            np.frombuffer(values, dtype).reshape(self.kv_heads, PAGE_TOKENS, self.head_dim),
        )

    def to_pages(self, keys: NDArray[Any], values: NDArray[Any]) -> list[bytes]:
        """Returns the full pages of tensors [kv_heads, positions, head_dim]; leaves out positions after them."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        pages: list[bytes] = []
        for start in range(0, keys.shape[1] // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
            part = slice(start, start + PAGE_TOKENS)
            turned = np.ascontiguousarray(keys[:, part].transpose(0, 2, 1), dtype=dtype)
            pages.append(turned.tobytes() + np.ascontiguousarray(values[:, part], dtype=dtype).tobytes())
        return pages

    def from_pages(self, pages: Sequence[bytes], tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns the keys and values of the first `tokens` positions, [kv_heads, tokens, head_dim] each.

        `pages` are those of one layer, in order; they must hold that many positions. Raises WireError for pages of
        another size.
        """
        keys = np.empty((self.kv_heads, len(pages) * PAGE_TOKENS, self.head_dim), self.dtype)
        values = np.empty_like(keys)
        for index, page in enumerate(pages):
            part = slice(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS)
            turned, values[:, part] = self.split(page)
            keys[:, part] = turned.transpose(0, 2, 1)
        return keys[:, :tokens], values[:, :tokens]

    def split(self, page: bytes) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns the keys and values of one page, as `arrays` does. Raises WireError for another size."""
        if len(page) != 2 * self.half_bytes:
            raise WireError(f"a page of KV has {len(page)} bytes instead of {2 * self.half_bytes}")
        return self.arrays(memoryview(page)[: self.half_bytes], memoryview(page)[self.half_bytes :])
