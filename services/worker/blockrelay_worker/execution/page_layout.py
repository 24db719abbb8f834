"""Layout of a KV page of one stage: 16 positions of a request, in every layer of the stage."""

from dataclasses import dataclass

import numpy as np

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.precisions import kv_item_bytes
from blockrelay_worker.kernels.specification import PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """Shape of the KV pages of one stage. `dtype` is float16 or float32 (`precisions.kv_item_bytes`)."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: type[np.float16] | type[np.float32] = np.float16

    @property
    def bytes_per_page(self) -> int:
        """Bytes of keys and values of 16 tokens in all layers of the stage."""
        return 2 * self.layers * self.kv_heads * self.head_dim * PAGE * np.dtype(self.dtype).itemsize

    def shapes(self, pages: int) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        """Returns the shapes of the keys and of the values of `pages` pages in one layer."""
        heads, dim = self.kv_heads, self.head_dim
        return (pages, heads, dim, PAGE), (pages, heads, PAGE, dim)


def layout_of(folder: BlockFolder, first_block: int, last_block: int) -> PageLayout:
    """Returns the page layout of a stage of these blocks (numbered from 1, both included).

    A stage of the head alone has no layers.
    """
    model = folder.model
    return PageLayout(
        layers=model.layers_in(first_block, last_block),
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=np.float16 if kv_item_bytes(folder.manifest.precisions) == 2 else np.float32,
    )


def pages_for(tokens: int) -> int:
    """Returns the number of pages that hold `tokens` tokens."""
    return -(-tokens // PAGE)
