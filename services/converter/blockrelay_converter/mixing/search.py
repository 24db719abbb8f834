"""Searches a small mix of precisions within a limit of perplexity. Pure but for the `measure` that is passed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from blockrelay.block_folder.model import Precision

Mix = tuple[Precision, ...]
"""The precision of each block, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixSearchResult:
    """The result of a search: the precisions and the perplexity that was measured with them.

    `costs` holds, by block index, the perplexity that the cheaper precision adds in this block alone. It is empty where
    all blocks could change at once.
    """

    precisions: Mix
    perplexity: float
    costs: Mapping[int, float] = field(default_factory=dict[int, float])


def cheapest(
    base: Mix, cheaper: Mix, saved: Sequence[int], *, limit: float, measure: Callable[[Mix], float]
) -> MixSearchResult | None:
    """Returns `base` with blocks of `cheaper` chosen greedily within `limit`; None if `base` itself is above it.

    `limit` is a perplexity, and `measure` returns the perplexity of a mix. `base` and `cheaper` are equally long. The
    result is `cheaper` if that is within the limit. Otherwise each block is first changed alone, to measure it. Blocks
    are then changed for good one after the other, beginning with the least perplexity per byte saved. A change of block
    i saves `saved[i-1]` > 0 bytes. It is kept if the measured perplexity stays within the limit. `measure` is called at
    most 2 + 2 N times for N blocks, and twice where all blocks may change.
    """
    at_base = measure(base)
    if at_base > limit:
        return None
    at_cheaper = measure(cheaper)
    if at_cheaper <= limit:
        return MixSearchResult(precisions=cheaper, perplexity=at_cheaper)

    def changed(mix: Mix, index: int) -> Mix:
        return (*mix[: index - 1], cheaper[index - 1], *mix[index:])

    indexes = [index for index in range(1, len(base) + 1) if base[index - 1] != cheaper[index - 1]]
    costs = {index: measure(changed(base, index)) - at_base for index in indexes}
    mix, perplexity = base, at_base
    for index in sorted(indexes, key=lambda index: costs[index] / saved[index - 1]):
        tried = changed(mix, index)
        measured = measure(tried)
        if measured <= limit:
            mix, perplexity = tried, measured
    return MixSearchResult(precisions=mix, perplexity=perplexity, costs=costs)
