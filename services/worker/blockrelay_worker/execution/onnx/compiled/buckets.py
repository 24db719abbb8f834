"""Which decode steps are one shape: a captured step can be run again for the very shapes it was captured with.

A step of single rows gets more sequences and a wider table until it has one of few shapes. The sequences that are added
have one row each, at position 0 of a page that nobody else has. Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blockrelay_worker.execution.batch import Segment
from blockrelay_worker.execution.page_layout import pages_for

SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
LEAST_PAGES = 8


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A table of `pages` for each of the `sequences`."""

    pages: int
    sequences: int

    def __str__(self) -> str:
        return f"{self.sequences} rows in {self.pages} pages"


def bucket_for(segments: Sequence[Segment], *, most_cells: int) -> Bucket | None:
    """The least that takes these; None where they are no decode step, or its table has more than `most_cells`."""
    if not 0 < len(segments) <= SEQUENCES[-1] or any(segment.rows != 1 for segment in segments):
        return None
    sequences = next(count for count in SEQUENCES if count >= len(segments))
    longest = max(pages_for(segment.first_position + 1) for segment in segments)
    pages = max(LEAST_PAGES, 1 << (longest - 1).bit_length())
    return Bucket(pages, sequences) if sequences * pages <= most_cells else None


def all_buckets(*, most_pages: int, most_cells: int) -> list[Bucket]:
    """Those that requests of up to `most_pages` come into, short contexts first."""
    return [
        Bucket(pages, sequences)
        for pages in _widths(most_pages)
        for sequences in SEQUENCES
        if sequences * pages <= most_cells
    ]


def filled(segments: Sequence[Segment], bucket: Bucket, *, spare_page: int) -> list[Segment]:
    """As many segments as the bucket has: more of them, behind these, on a page that nobody reads."""
    return [*segments, *[Segment(rows=1, first_position=0, pages=(spare_page,))] * (bucket.sequences - len(segments))]


def _widths(most_pages: int) -> Iterator[int]:
    width = LEAST_PAGES
    yield width
    while width < most_pages:
        width *= 2
        yield width
