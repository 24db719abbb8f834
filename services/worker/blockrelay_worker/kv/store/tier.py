"""What a tier of the page store can do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Trouble = Literal["full", "corrupt", "unreachable"]


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page of consecutive blocks: one record per block, in their order. Good until `Tier.put` returns."""

    name: bytes
    records: Sequence[bytes | memoryview]


class Tier(Protocol):
    """A place for pages that is shared with other processes. Used by one reading and one writing thread at once.

    No method raises for what may happen to a tier: a place that is full, gone or unreachable stores nothing and finds
    nothing, and counts why. Pages may vanish at any time; the first writer of a page wins.
    """

    @property
    def label(self) -> str:
        """Its name in metrics."""
        ...

    def may_have(self, name: bytes) -> bool:
        """False when asking for this page would be in vain. At once: the engine loop asks."""
        ...

    def get(self, names: Sequence[bytes], blocks: range) -> list[list[bytes] | None]:
        """For each name the records of all `blocks`, unverified, or None when one is missing. Counts as a use."""
        ...

    def put(self, pages: Sequence[StoredPage], blocks: range) -> None:
        """Store pages of `blocks`, as far as there is room; gives up pages that were not used for longest."""
        ...

    def discard(self, name: bytes, blocks: range) -> None:
        """Remove what is there of this page: a reader found it broken."""
        ...

    def used_bytes(self) -> int:
        """What it holds, as far as this process knows."""
        ...
