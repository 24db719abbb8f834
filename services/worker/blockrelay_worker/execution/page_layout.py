"""What a page of one stage holds: 16 positions of a request, in every layer of the stage."""

from dataclasses import dataclass

import numpy as np

from blockrelay_worker.kernels.specification import PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """Shape of the KV of one stage. `dtype` is float16 or float32 (`precisions.kv_item_bytes`)."""

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
