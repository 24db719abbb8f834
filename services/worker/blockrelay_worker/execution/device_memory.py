"""What a stage takes of a device that has memory of its own, and how many KV pages that leaves. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockrelay.errors import UsageError

#: What is left to others and to what a step needs beside weights and pages, where nobody says: a share, and bytes.
USED_SHARE, LEFT_BYTES = 0.9, 300 * 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """`block_bytes`: the weights of each block as they lie there; `table_bytes`: what every stage with layers has
    beside them; `least_pages`: fewer KV pages are no stage. `budget_bytes`: what may be used of the device when nobody
    says; None where it does not tell what is free."""

    device: str
    block_bytes: Sequence[int]
    table_bytes: int
    least_pages: int
    budget_bytes: int | None

    def weight_bytes(self, first_block: int, last_block: int) -> int:
        """Of a stage of these blocks (numbered from 1, both included)."""
        layers = first_block < len(self.block_bytes)  # the last block is the head
        return sum(self.block_bytes[first_block - 1 : last_block]) + (self.table_bytes if layers else 0)


def default_budget(free_bytes: int) -> int:
    """Of a device of which so many bytes are free."""
    return max(0, int(free_bytes * USED_SHARE) - LEFT_BYTES)


def pages_within(
    memory: DeviceMemory, first_block: int, last_block: int, *, budget_bytes: int, page_bytes: int, useful: int
) -> int:
    """KV pages of a stage: what the budget leaves behind the weights, and not more than `useful`.

    Raises UsageError with the figures where there is no room for the weights and the least number of pages.
    """
    weights = memory.weight_bytes(first_block, last_block)
    least = memory.least_pages if page_bytes else 0
    if weights + least * page_bytes > budget_bytes:
        raise UsageError(
            f"block_{first_block} to block_{last_block} need {weights:,} bytes for weights and {least * page_bytes:,} "
            f"for {least} KV pages on {memory.device}, where they may use {budget_bytes:,}: raise --gpu-memory, or cut "
            "the model into more stages"
        )
    return useful if page_bytes == 0 else max(least, min(useful, (budget_bytes - weights) // page_bytes))
