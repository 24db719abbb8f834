"""Memory budget of a device: bytes of the weights of its stages, and KV pages that fit beside them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockrelay.errors import NoDeviceMemory
from blockrelay.protocol.plan import Stage
from blockrelay_worker.policy import DEVICE_LEFT_BYTES, DEVICE_USED_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Sizes of one model on one device, from which the number of KV pages follows."""

    device: str
    block_bytes: Sequence[int]
    """Bytes of the weights of each block on the device; stages that share a block share its weights."""
    block_layers: Sequence[int]
    """Number of layers of each block."""
    table_bytes: int
    """Bytes of the rotary tables, kept once on a device for all stages with layers."""
    layer_page_bytes: int
    """Bytes of one KV page of one layer."""
    least_pages: int
    """Fewest KV pages with which a stage can serve."""
    canary_pages: int
    """KV pages that each stage keeps for its canary, beside those of requests."""
    budget_bytes: int | None
    """Bytes that may be used by default; None for a device that does not report its free memory."""
    max_sessions: int | None = None
    """Limit of warm ONNX sessions at once; None: no limit."""
    max_bytes: int | None = None
    """Limit of the bytes of warm ONNX sessions, of which one is always allowed; None: no limit."""

    def weight_bytes(self, *stages: Stage) -> int:
        """Returns the bytes of the weights of `stages` together; blocks that they share count once.

        Rotary tables are included. With limits of warm sessions, only blocks that may be warm at once count.
        """
        blocks = {block for stage in stages for block in range(stage.first, stage.last + 1)}
        layers = any(self._layers(stage) for stage in stages)
        held = held_at_once([self.block_bytes[block - 1] for block in blocks], self.max_sessions, self.max_bytes)
        return held + (self.table_bytes if layers else 0)

    def page_bytes(self, stage: Stage) -> int:
        """Returns the bytes of one KV page in all layers of the stage."""
        return self._layers(stage) * self.layer_page_bytes

    def pool_bytes(self, stage: Stage, pages: int) -> int:
        """Returns the bytes of `pages` KV pages and the stage's canary pages."""
        return (pages + self.canary_pages) * self.page_bytes(stage)

    def _layers(self, stage: Stage) -> int:
        return sum(self.block_layers[stage.first - 1 : stage.last])


def held_at_once(sizes: Sequence[int], sessions: int | None, max_bytes: int | None) -> int:
    """Returns the most bytes that blocks of these sizes take when at most `sessions` are loaded at once.

    `max_bytes` limits the bytes too, but one block always fits. None stands for no limit.
    """
    held = sum(sorted(sizes, reverse=True)[:sessions])
    return held if max_bytes is None else min(held, max(max_bytes, max(sizes, default=0)))


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The other stages of a device."""

    loaded: tuple[tuple[Stage, int], ...] = ()
    """Loaded stages, each with the bytes of its KV pages."""
    expected: tuple[Stage, ...] = ()
    """Stages that the plan gives other workers, which have not loaded them yet."""
    unknown: int = 0
    """Number of workers that have no stage in the plan yet."""


_ALONE = Neighbours()


def default_budget(free_bytes: int) -> int:
    """Returns the bytes that may be used by default of a device with `free_bytes` of free memory."""
    return max(0, int(free_bytes * DEVICE_USED_SHARE) - DEVICE_LEFT_BYTES)


def pages_within(
    memory: DeviceMemory,
    stage: Stage,
    *,
    budget_bytes: int,
    useful: int,
    neighbours: Neighbours = _ALONE,
) -> int:
    """Returns the number of KV pages of a stage, beside its canary pages, that fit into the budget of a device.

    It is `useful` at most, but never below `memory.least_pages`. The budget less all weights and the pages of loaded
    stages is shared by the stages that are not loaded yet. Each gets the same number of pages, since a request takes
    equally many in every stage. An unknown stage counts as this one. A stage of the head alone, whose pages have no
    content, gets `useful`.

    Raises NoDeviceMemory, with the figures, where the weights and the least number of pages, canary pages included, do
    not fit.
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
        raise NoDeviceMemory(
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
    """Returns the number of KV pages of a stage, `useful` at most, on a device whose free memory is unknown.

    The pages of all its stages together get `kv_bytes`; weights are not counted. The number is at least 2, even beyond
    `kv_bytes`. A stage of the head alone has pages without content, and gets `useful`.
    """
    left = kv_bytes - sum(pool for _, pool in neighbours.loaded)
    together = sum(map(memory.page_bytes, (stage, *neighbours.expected, *[stage] * neighbours.unknown)))
    return max(2, min(useful, left // together)) if memory.page_bytes(stage) else useful
