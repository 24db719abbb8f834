"""Maps the rows of a batch to positions, KV pages and slots, in the arrays that the kernels take."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.batch import Segment
from blockrelay_worker.execution.cpu.workspace import Workspace
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels.arguments import F32, I32
from blockrelay_worker.kernels.specification import PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMapping:
    """Position, KV page and slot of each of the R rows of a batch with S segments.

    positions, page and slot are int32 [R]; page_table int32 [S, maxpages] and segments int64 [S, 3] are as in
    `Kernels.attention`; owner [R] is the index of each row's segment; cos and sin are the model's rotary tables.
    """

    positions: I32
    page: I32
    slot: I32
    page_table: I32
    segments: NDArray[np.int64]
    owner: NDArray[np.intp]
    cos: F32
    sin: F32

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes (R, S, maxpages)."""
        return self.positions.size, *self.page_table.shape

    def single(self, wanted: NDArray[np.intp]) -> tuple[I32, NDArray[np.int64]]:
        """Returns (page table, segments) in which each of the n rows `wanted` is a segment of its own.

        They are new arrays, int32 [n, maxpages] and int64 [n, 3], for a batch of these rows in this order.
        """
        count = wanted.size
        segments = np.ones((count, 3), np.int64)
        segments[:, 0] = np.arange(count)
        segments[:, 2] = self.positions[wanted]
        return self.page_table[self.owner[wanted]], segments


def owners(segments: NDArray[np.int64]) -> NDArray[np.intp]:
    """Returns the index of each row's segment [R], for segments [S, 3] as `Kernels.attention` takes them."""
    return np.repeat(np.arange(len(segments)), segments[:, 1])


def place(segments: Sequence[Segment], space: Workspace, cos: F32, sin: F32, *, keeps_pages: bool) -> SlotMapping:
    """Maps segments, at least one, which `check_segments` has accepted, to rows in buffers of the workspace.

    They have no more rows than the workspace's capacity. With `keeps_pages` False (a stage without layers) all rows map
    to page 0, which is never read. The result is valid until the next call with the same workspace.
    """
    needed = [pages_for(segment.first_position + segment.rows) for segment in segments]
    table, places = space.page_table(len(segments), max(needed)), space.segments(len(segments))
    table.fill(0)
    first_row = 0
    for index, (segment, pages) in enumerate(zip(segments, needed, strict=True)):
        if keeps_pages:
            table[index, :pages] = segment.pages[:pages]
        places[index] = (first_row, segment.rows, segment.first_position)
        first_row += segment.rows
    positions, page, slot = space.indexes(first_row)
    if len(segments) == 1:  # a single request, and most prompts: faster
        first = segments[0].first_position
        owner = np.zeros(first_row, np.intp)
        positions[:] = np.arange(first, first + first_row)
        page[:] = table[0, positions // PAGE]
    else:
        owner = owners(places)
        positions[:] = np.arange(first_row) - places[owner, 0] + places[owner, 2]
        page[:] = table[owner, positions // PAGE]
    slot[:] = positions % PAGE
    return SlotMapping(
        positions=positions, page=page, slot=slot, page_table=table, segments=places, owner=owner, cos=cos, sin=sin
    )
