"""The KV memory of one stage: pages of 16 tokens, handed out by number.

One page number names the same 16 positions of a request in every layer of the stage, so a request owns one list of
page numbers per stage. Memory is mapped but not touched until a page is first written: a pool may be sized for the
worst case.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import DTypeLike, NDArray

from blockrelay.errors import Overloaded
from blockrelay_worker.kernels.numerics import PAGE
from blockrelay_worker.memory import untouched_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """Shape of the KV of one stage. `dtype` is float16 (w8a8) or float32 (fp32)."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: type[np.float16] | type[np.float32] = np.float16

    @property
    def bytes_per_page(self) -> int:
        """Keys and values of 16 tokens in all layers of the stage."""
        return 2 * self.layers * self.kv_heads * self.head_dim * PAGE * np.dtype(self.dtype).itemsize


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE)


class PagePool:
    """`pages` pages of one layout; ids are 0..pages-1.

    `k_pages[layer]` is [pages, kv_heads, head_dim, 16] and `v_pages[layer]` [pages, kv_heads, 16, head_dim], where
    layer counts from 0 within the stage; both 64-byte aligned. Who has allocated a page may write it; nothing is
    cleared on `free`. Not thread-safe: the engine loop owns the pool.
    """

    def __init__(self, layout: PageLayout, pages: int) -> None:
        if pages < 1:
            raise ValueError("a page pool needs at least one page")
        self.layout = layout
        self.pages = pages
        k_shape = (pages, layout.kv_heads, layout.head_dim, PAGE)
        v_shape = (pages, layout.kv_heads, PAGE, layout.head_dim)
        self.k_pages = [_mapped(k_shape, layout.dtype) for _ in range(layout.layers)]
        self.v_pages = [_mapped(v_shape, layout.dtype) for _ in range(layout.layers)]
        # A stack: the page freed last is the one most likely still in a cache, and the first pages are used first.
        self._free = list(range(pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free_pages(self) -> int:
        """How many pages `allocate` can still give."""
        return len(self._free)

    @property
    def used_pages(self) -> int:
        """How many pages are handed out."""
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """`count` page ids, now owned by the caller. Raises Overloaded and takes none if fewer are free."""
        if count > len(self._free):
            raise Overloaded(f"{count} KV pages wanted and {len(self._free)} of {self.pages} are free")
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def free(self, pages: list[int]) -> None:
        """Give pages back. Freeing a page twice, or one that was never handed out, is our bug: AssertionError."""
        for page in reversed(pages):
            assert page in self._used, f"page {page} is not handed out"
            self._used.remove(page)
            self._free.append(page)

    def check_integrity(self) -> None:
        """Every page is either free or used, once. Raises AssertionError; meant for idle time and tests."""
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert self._used.isdisjoint(self._free), "a page is free and used"
        assert len(self._free) + len(self._used) == self.pages, "a page is neither free nor used"


def _mapped(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.float16] | NDArray[np.float32]:
    """An array of zeros on memory of its own that is not touched yet."""
    return untouched_bytes(prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
