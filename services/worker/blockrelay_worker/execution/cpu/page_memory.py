"""The KV pages of one stage in a CPU's memory.

Memory is mapped but not touched until a page is first written: it may be sized for the worst case.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import DTypeLike, NDArray

from blockrelay_worker.execution.executor import PageContent
from blockrelay_worker.execution.page_layout import PageLayout
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kernels.buffers import untouched_bytes


class PageMemory:
    """`pages` KV pages (at least 1) of one stage: their accounting (`pool`) and their contents.

    `k_pages[layer]` is [pages, kv_heads, head_dim, 16] and `v_pages[layer]` [pages, kv_heads, 16, head_dim], where
    layer counts from 0 within the stage; both are 64-byte aligned. A freed page keeps its old contents.
    """

    def __init__(self, layout: PageLayout, pages: int) -> None:
        self.layout = layout
        self.pool = PagePool(layout, pages)
        k_shape, v_shape = layout.shapes(pages)
        self.k_pages = [_mapped(k_shape, layout.dtype) for _ in range(layout.layers)]
        self.v_pages = [_mapped(v_shape, layout.dtype) for _ in range(layout.layers)]

    def export_pages(self, pages: Sequence[int]) -> list[PageContent]:
        """Returns the contents of `pages` as views (see `PageOwner.export_pages`)."""
        return [[(k[page], v[page]) for k, v in zip(self.k_pages, self.v_pages, strict=True)] for page in pages]

    def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        """Writes exported contents into `pages` (see `PageOwner.import_pages`)."""
        for page, layers in zip(pages, contents, strict=True):
            for (keys, values), k, v in zip(layers, self.k_pages, self.v_pages, strict=True):
                k[page], v[page] = keys, values


def _mapped(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.float16] | NDArray[np.float32]:
    """Returns an array of zeros whose memory is not touched yet."""
    return untouched_bytes(prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
