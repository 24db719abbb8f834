"""How far the KV pages of a request hold numbers, and not what a row left that became NaN or infinite."""

from collections.abc import Sequence

import numpy as np

from blockrelay_worker.execution.executor import PageOwner
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels.specification import PAGE


def finite_tokens(owner: PageOwner, pages: Sequence[int], tokens: int, *, known: int = 0) -> int:
    """How many of the first `tokens` tokens of `pages`, a request's from its beginning, have finite keys and values:
    all, or those before the first page that has not. Pages of the first `known` are not looked at.

    Raises ExecutionError when the device that has them fails.
    """
    if not owner.layout.layers:
        return tokens
    for index in range(known // PAGE, pages_for(tokens)):
        filled = min(PAGE, tokens - index * PAGE)
        (content,) = owner.export_pages([pages[index]])
        for keys, values in content:
            if not (np.isfinite(keys[..., :filled]).all() and np.isfinite(values[:, :filled]).all()):
                return index * PAGE
    return tokens
