"""What the stages of a device that has memory of its own take there, and how many KV pages that leaves each. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockrelay.errors import UsageError
from blockrelay.protocol.plan import Stage

#: What is left to others and to what a step needs beside weights and pages, where nobody says: a share, and bytes.
USED_SHARE, LEFT_BYTES = 0.9, 300 * 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """`block_bytes`: the weights of each block as they lie there, once for all stages; `block_layers`: the layers that
    each block has; `table_bytes`: what stages with layers have beside them, once too; `layer_page_bytes`: one KV page
    of one layer. `least_pages`: fewer KV pages are no stage; `canary_pages`: those that each stage has beside the ones
    of requests. `budget_bytes`: what may be used of the device when nobody says; None where it does not tell what is
    free. Of blocks whose sessions come and go `most_sessions` are there at once, within `most_bytes`; None: all."""

    device: str
    block_bytes: Sequence[int]
    block_layers: Sequence[int]
    table_bytes: int
    layer_page_bytes: int
    least_pages: int
    canary_pages: int
    budget_bytes: int | None
    most_sessions: int | None = None
    most_bytes: int | None = None

    def weight_bytes(self, *stages: Stage) -> int:
        """Of stages together: what they share is there once."""
        blocks = {block for stage in stages for block in range(stage.first, stage.last + 1)}
        layers = any(self._layers(stage) for stage in stages)
        held = held_at_once([self.block_bytes[block - 1] for block in blocks], self.most_sessions, self.most_bytes)
        return held + (self.table_bytes if layers else 0)

    def page_bytes(self, stage: Stage) -> int:
        """Of one KV page in all layers of the stage."""
        return self._layers(stage) * self.layer_page_bytes

    def pool_bytes(self, stage: Stage, pages: int) -> int:
        """Of so many KV pages, and those of canaries."""
        return (pages + self.canary_pages) * self.page_bytes(stage)

    def _layers(self, stage: Stage) -> int:
        return sum(self.block_layers[stage.first - 1 : stage.last])


def held_at_once(sizes: Sequence[int], sessions: int | None, most: int | None) -> int:
    """Bytes of blocks of these sizes where so many `sessions` are there at once, within `most` bytes, but one always
    is; None: as many as there are."""
    held = sum(sorted(sizes, reverse=True)[:sessions])
    return held if most is None else min(held, max(most, max(sizes, default=0)))


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The other stages of a device: those that are loaded, with the bytes of their KV pages, and those that will be;
    `unknown` more workers have no stage yet."""

    loaded: tuple[tuple[Stage, int], ...] = ()
    expected: tuple[Stage, ...] = ()
    unknown: int = 0


_ALONE = Neighbours()


def default_budget(free_bytes: int) -> int:
    """Of a device of which so many bytes are free."""
    return max(0, int(free_bytes * USED_SHARE) - LEFT_BYTES)


def pages_within(
    memory: DeviceMemory,
    stage: Stage,
    *,
    budget_bytes: int,
    useful: int,
    neighbours: Neighbours = _ALONE,
) -> int:
    """KV pages of a stage: its share of what the budget leaves behind all weights and the pages that are there, and not
    more than `useful`.

    A request takes as many pages in each stage, so that all stages which are not loaded yet share what is left by the
    bytes of a page: they get equal numbers of pages. One that nobody knows yet counts as this one. Raises UsageError
    with the figures where there is no room for the weights and the least number of pages.
    """
    coming = [stage, *neighbours.expected, *[stage] * neighbours.unknown]
    others = [*neighbours.expected, *(other for other, _ in neighbours.loaded)]
    taken = memory.weight_bytes(*others) + sum(pool for _, pool in neighbours.loaded)
    weights = memory.weight_bytes(stage, *others) - memory.weight_bytes(*others)
    left = budget_bytes - taken - weights
    together = sum(map(memory.page_bytes, coming))
    least = memory.least_pages + memory.canary_pages
    page_bytes = memory.page_bytes(stage)
    if left < least * together:
        alone = neighbours == _ALONE
        theirs = taken + least * (together - page_bytes)
        beside = "" if alone else f" together with other stages there, which need {theirs:,}"
        raise UsageError(
            f"block_{stage.first} to block_{stage.last} need {weights:,} bytes for weights and {least * page_bytes:,} "
            f"for {least if page_bytes else 0} KV pages on {memory.device}, where they may use "
            f"{budget_bytes:,}{beside}: raise --gpu-memory, or cut the model into more stages"
        )
    if page_bytes == 0:
        return useful
    return max(memory.least_pages, min(useful, left // together - memory.canary_pages))


def pages_of_host(
    memory: DeviceMemory, stage: Stage, *, kv_bytes: int, useful: int, neighbours: Neighbours = _ALONE
) -> int:
    """The same where nobody knows what the device has: all stages together have `kv_bytes` for pages."""
    left = kv_bytes - sum(pool for _, pool in neighbours.loaded)
    together = sum(map(memory.page_bytes, (stage, *neighbours.expected, *[stage] * neighbours.unknown)))
    return max(2, min(useful, left // together)) if memory.page_bytes(stage) else useful
