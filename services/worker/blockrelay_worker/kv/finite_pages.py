"""Finds the first KV page of a request that holds NaN or infinity."""

from collections.abc import Sequence

import numpy as np

from blockrelay_worker.execution.executor import PageOwner
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels.specification import PAGE


def finite_tokens(owner: PageOwner, pages: Sequence[int], tokens: int, *, known: int = 0) -> int:
    """Number of leading tokens, of the first `tokens`, whose keys and values in `pages` are finite.

    `pages` are a request's, from its beginning. The answer is `tokens`, or the beginning of the first page that is not
    finite. Full pages of the first `known` tokens are not read. Raises ExecutionError when the device with the pages
    fails.
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
