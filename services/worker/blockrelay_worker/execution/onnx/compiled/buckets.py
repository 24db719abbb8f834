"""Buckets of decode steps: a recorded step can be replayed only with the shapes it was recorded with.

A step of single tokens gets more sequences and a wider page table, until it has one of few shapes. Each added sequence
has one token, at position 0 of a spare page. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from blockrelay_worker.execution.batch import Segment
from blockrelay_worker.execution.page_layout import pages_for

#: Sequences of a bucket.
SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
#: Pages of the narrowest table; wider ones have powers of two.
LEAST_PAGES = 8


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A shape of decode steps: `sequences` sequences of one token, with tables of `pages` pages."""

    pages: int
    sequences: int

    def __str__(self) -> str:
        return f"{self.sequences} rows in {self.pages} pages"


def bucket_for(segments: Sequence[Segment], *, max_cells: int) -> Bucket | None:
    """Returns the smallest bucket that holds `segments`. None if a segment has several tokens, if there are no segments
    or more than 64, or if the bucket's page table has more than `max_cells` cells."""
    if not 0 < len(segments) <= SEQUENCES[-1] or any(segment.rows != 1 for segment in segments):
        return None
    sequences = next(count for count in SEQUENCES if count >= len(segments))
    longest = max(pages_for(segment.first_position + 1) for segment in segments)
    pages = _width(longest)
    return Bucket(pages, sequences) if sequences * pages <= max_cells else None


def all_buckets(*, max_pages: int, max_cells: int) -> list[Bucket]:
    """Returns the buckets of requests with up to `max_pages` pages, short contexts first.

    Buckets whose page table has more than `max_cells` cells (sequences times pages) are left out.
    """
    return [
        Bucket(pages, sequences)
        for pages in sorted({_width(count) for count in range(1, max_pages + 1)})
        for sequences in SEQUENCES
        if sequences * pages <= max_cells
    ]


def filled(segments: Sequence[Segment], bucket: Bucket, *, spare_page: int) -> list[Segment]:
    """Returns the segments, and after them as many on `spare_page` as the bucket, which holds them, has room for."""
    return [*segments, *[Segment(rows=1, first_position=0, pages=(spare_page,))] * (bucket.sequences - len(segments))]


def _width(pages: int) -> int:
    """Returns the width of the narrowest table for contexts of `pages` pages."""
    return max(LEAST_PAGES, 1 << (pages - 1).bit_length())
