"""The interface of a page store tier."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

#: The kinds of failures of a tier that are counted.
TierFailure = Literal["full", "corrupt", "unreachable"]


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page of consecutive blocks: one record per block, in their order. Valid until `Tier.put` returns."""

    block_hash: bytes
    records: Sequence[bytes | memoryview]


class Tier(Protocol):
    """A place for KV pages that processes share. One reading and one writing thread use it at the same time.

    No method raises for failures of the place: a tier that is full, gone or unreachable stores and finds nothing, and
    counts why. Pages may vanish at any time; the first writer of a page wins.

    Pages of preempted runs are held: for `policy.HOLD_S` seconds they count as used last, and make no room for others.
    A process that dies need not let them go.
    """

    @property
    def label(self) -> str:
        """The tier's name in metrics."""
        ...

    def may_have(self, block_hash: bytes) -> bool:
        """False if `get` would not find this page. Must not block: the engine loop calls it."""
        ...

    def get(self, hashes: Sequence[bytes], blocks: range) -> list[list[bytes] | None]:
        """Returns for each of `hashes` the records of all `blocks`, unverified; None if one is missing.

        Counts as a use of the pages.
        """
        ...

    def put(self, pages: Sequence[StoredPage], blocks: range) -> None:
        """Stores pages of `blocks`; removes the least recently used ones if there is no room."""
        ...

    def hold(self, hashes: Sequence[bytes], blocks: range) -> list[bool]:
        """Holds those of the pages that it has with all `blocks`; returns for each whether it does.

        It holds no page if it holds half of its limit already.
        """
        ...

    def let_go(self, hashes: Sequence[bytes], blocks: range) -> None:
        """Ends the holding of these pages, which count as used now. `get` does so too."""
        ...

    def discard(self, block_hash: bytes, blocks: range) -> None:
        """Removes this page, for `blocks` at least: its content is wrong or corrupt."""
        ...

    def used_bytes(self) -> int:
        """Bytes that the tier holds, as far as this process knows."""
        ...
