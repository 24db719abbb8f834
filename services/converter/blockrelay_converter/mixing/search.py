"""The cheapest precisions within a perplexity. Pure but for `measure`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from blockrelay.block_folder.model import Precision

Mix = tuple[Precision, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`perplexity` was measured with exactly these precisions.

    `costs`: block index -> perplexity that the cheaper precision costs in this block alone. Empty where there was no
    need to know.
    """

    precisions: Mix
    perplexity: float
    costs: Mapping[int, float] = field(default_factory=dict[int, float])


def cheapest(
    base: Mix, cheaper: Mix, saved: Sequence[int], *, limit: float, measure: Callable[[Mix], float]
) -> Found | None:
    """`base` with as many blocks of `cheaper` as stay within `limit`; None if `base` itself does not.

    Greedy over measured sensitivity: blocks are tried one after the other, those first that cost least perplexity for
    each byte saved when they alone change (`saved[i-1]` bytes for block i); each is kept if what is there then stays
    within the limit, measured. At most 2 + 2 N calls of `measure`, 2 where all blocks may change.
    """
    at_base = measure(base)
    if at_base > limit:
        return None
    at_cheaper = measure(cheaper)
    if at_cheaper <= limit:
        return Found(precisions=cheaper, perplexity=at_cheaper)

    def changed(mix: Mix, index: int) -> Mix:
        return (*mix[: index - 1], cheaper[index - 1], *mix[index:])

    indexes = [index for index in range(1, len(base) + 1) if base[index - 1] != cheaper[index - 1]]
    costs = {index: measure(changed(base, index)) - at_base for index in indexes}
    mix, perplexity = base, at_base
    for index in sorted(indexes, key=lambda index: costs[index] / saved[index - 1]):
        tried = changed(mix, index)
        found = measure(tried)
        if found <= limit:
            mix, perplexity = tried, found
    return Found(precisions=mix, perplexity=perplexity, costs=costs)
