"""Decides which runs wait for KV pages that other runs are computing, instead of computing the same pages too. Pure.

Requests of one beginning that come together, such as the choices of a prompt, find nothing in the prefix cache: the
oldest computes the pages, and the others go on behind it page by page. A run waits only for an older one that computes,
so that none waits for ever; and no longer than that takes for a page that it would have to compute itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blockrelay_worker.kernels.specification import PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A run of the first stage whose prompt is being computed, or waits for that."""

    request_id: str
    route: tuple[str, ...]
    """Ids of the workers of the later stages, which must have its pages too; empty for a whole model on one worker."""
    names: Sequence[bytes]
    """Block hashes of its leading full pages, under which other runs find them."""
    computed: int
    """Number of leading tokens that are computed here."""
    wanted: int
    """Number of leading pages that it may take from others; 0: none, because it has computed rows of its own."""
    certain: int
    """Number of leading tokens whose pages other runs find on all stages of the route."""


def waiting(oldest_first: Iterable[Prefill]) -> frozenset[str]:
    """Returns the ids of requests whose next page an older run computes: they should wait for it."""
    leaders: dict[tuple[bytes, tuple[str, ...]], list[Prefill]] = {}
    waits: set[str] = set()
    for one in oldest_first:
        if not one.names:
            continue
        others = leaders.setdefault((one.names[0], one.route), [])
        page = one.computed // PAGE
        if page < one.wanted and any(_computes(other, page, one) for other in others):
            waits.add(one.request_id)
        else:
            others.append(one)
    return frozenset(waits)


def _computes(other: Prefill, page: int, one: Prefill) -> bool:
    """True if `other` computes the `page` that `one` needs next, and it is worth the wait.

    On several stages the wait is for all that `other` computes, so at least half of that must be useful.
    """
    if page >= len(other.names) or other.names[page] != one.names[page] or other.certain >= (page + 1) * PAGE:
        return False
    half = (other.certain // PAGE + len(other.names)) // 2
    return not other.route or half < page or (half < one.wanted and other.names[half] == one.names[half])
