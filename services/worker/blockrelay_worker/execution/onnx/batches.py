"""The input arrays of a stage's graph for a ragged batch. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.batch import Segment
from blockrelay_worker.execution.onnx.graphs.flavours import PLAIN, Flavour
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels.specification import PAGE


def batch_inputs(segments: Sequence[Segment], flavour: Flavour, *, least_pages: int = 1) -> dict[str, NDArray[Any]]:
    """Returns by name the inputs of the flavour's graphs that change with the batch: all that `describe_batch` declares
    but the rotary tables `cos` and `sin`.

    `segments`: at least one, in the order of the rows. Page tables have `least_pages` columns or more. `bounds` of the
    flavour `paged` is always there, also for a graph in which it is a constant.
    """
    return _plain(segments, least_pages) if flavour == PLAIN else _paged(segments, least_pages)


def cut(segments: Sequence[Segment], rows: int) -> list[Segment]:
    """Returns the same tokens on the same pages in segments of at most `rows` tokens.

    A request may then have several segments in one step. Both flavours write all keys and values before they read any,
    so each segment sees those of the segments before it.
    """
    return [
        replace(segment, rows=min(rows, segment.rows - at), first_position=segment.first_position + at)
        for segment in segments
        for at in range(0, segment.rows, rows)
    ]


def _plain(segments: Sequence[Segment], least_pages: int) -> dict[str, NDArray[Any]]:
    """Returns the inputs of the flavour `plain`: see `graphs.plain`."""
    rows = np.array([segment.rows for segment in segments])
    first = np.array([segment.first_position for segment in segments])
    count, longest = len(segments), int(rows.max())
    table = _table(segments, least_pages, np.int64)
    sequence = np.repeat(np.arange(count), rows)  # [R]
    begins = np.cumsum(rows) - rows
    step = np.arange(rows.sum()) - begins[sequence]
    positions = first[sequence] + step
    padded, reach = np.zeros((count, longest), np.int64), np.zeros((count, longest), np.float32)
    padded[sequence, step] = np.arange(rows.sum())
    reach[sequence, step] = positions
    return {
        "positions": positions,
        "slots": np.stack([table[sequence, positions // PAGE], positions % PAGE], axis=1),
        "rows": padded,
        "back": sequence * longest + step,
        "reach": reach,
        "table": table,
        "seen": np.arange(table.shape[1] * PAGE, dtype=np.float32),
    }


def _paged(segments: Sequence[Segment], least_pages: int) -> dict[str, NDArray[Any]]:
    """Returns the inputs of the flavour `paged`: see `graphs.paged`."""
    rows = [segment.rows for segment in segments]
    longest = max(_end(segment) for segment in segments)
    return {
        "cumulative": np.cumsum([0, *rows], dtype=np.int32),
        "past": np.array([segment.first_position for segment in segments], np.int32),
        "table": _table(segments, least_pages, np.int32),
        "bounds": np.array([max(rows), longest, longest], np.int32),
    }


def _table(segments: Sequence[Segment], least_pages: int, dtype: type[np.signedinteger[Any]]) -> NDArray[Any]:
    """Returns the page table [segments, pages of the longest context], padded with 0."""
    counts = [pages_for(_end(segment)) for segment in segments]
    table = np.zeros((len(counts), max(least_pages, *counts)), dtype)
    for line, segment, count in zip(table, segments, counts, strict=True):
        line[:count] = segment.pages[:count]
    return table


def _end(segment: Segment) -> int:
    return segment.first_position + segment.rows
