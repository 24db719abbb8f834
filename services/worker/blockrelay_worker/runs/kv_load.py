"""A load of KV pages from the page store, or from what a client supplied, and its result."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SuppliedKv:
    """KV supplied by a client, as seen from a sequence of pages to fill."""

    request_id: str
    """The request's id."""
    first: int
    """Index, in the request, of the first page to fill."""
    pages: int
    """Number of leading pages of the request that the client supplied."""

    def page(self, index: int) -> int | None:
        """The index in the request of page `index` of the sequence; None if the client did not supply it."""
        return self.first + index if self.first + index < self.pages else None


@dataclass(frozen=True, slots=True, eq=False)
class KvLoad:
    """Pages of the pool to be filled from the store, in order. Until it has ended the pages belong to the load."""

    hashes: tuple[bytes, ...]
    """Block hashes of the pages (`kv.block_hashes`)."""
    pages: tuple[int, ...]
    """Indexes in the pool."""
    partial_tokens: int = 0
    """Tokens wanted of the last page, if it is a partial one; 0: it is full."""
    given: SuppliedKv | None = None
    """KV that the client supplied for some of the pages."""
    resumes: bool = False
    """The run was preempted, or its request has run before."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load: its first `count` pages are filled, the content of the others is undefined."""

    load: KvLoad
    count: int
