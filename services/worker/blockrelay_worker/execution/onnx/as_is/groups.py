"""A ragged batch as the runs that ONNX blocks take: sequences of one length behind pasts of one length. Pure.

Graphs that others made have one batch axis and one axis of positions. Padding would make the ragged rest of a batch
fit, but whether a graph computes the same beside padding is the exporter's secret; a run for each pair of lengths is
right with every graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.batch import Segment
from blockrelay_worker.execution.onnx.as_is.paged_graph import PAGES, PAST, SLOTS, TAKE
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels.specification import PAGE

#: The input of a request that says where its rows are.
POSITIONS = "position_ids"


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """What runs together. `inputs` by name, those of the request included; `wanted` are the indexes, in the batch's
    `wanted`, of the logits that come out, in order."""

    inputs: Mapping[str, NDArray[Any]]
    wanted: tuple[int, ...]


def waves(segments: Sequence[Segment], *, one_by_one: bool) -> list[list[tuple[int, Segment]]]:
    """What runs one after the other, each part with the first of its rows in the batch.

    All at once; with `one_by_one` rows behind a past come one at a time, since the attention of such graphs takes
    several only where there are none before them.
    """
    begins = np.cumsum([0, *(segment.rows for segment in segments)])
    found: list[list[tuple[int, Segment]]] = []
    for begin, segment in zip(begins, segments, strict=False):
        alone = one_by_one and segment.first_position > 0
        parts = segment.rows if alone else 1
        for number in range(parts):
            part = replace(segment, rows=1, first_position=segment.first_position + number) if alone else segment
            if len(found) == number:
                found.append([])
            found[number].append((int(begin) + number, part))
    return found


def grouped(
    parts: Sequence[tuple[int, Segment]],
    tokens: NDArray[np.int32],
    wanted: Sequence[int],
    request: Mapping[str, str],
    *,
    single: bool = False,
) -> list[Group]:
    """The groups of a wave, in a batch whose rows have these `tokens`. `request`: the request's inputs and their
    dtypes; `single`: every sequence for itself."""
    members: dict[tuple[int, ...], list[tuple[int, Segment]]] = {}
    for part in parts:
        begin, segment = part
        key = (segment.rows, segment.first_position, *((begin,) if single else ()))
        members.setdefault(key, []).append(part)
    return [_group(together, tokens, wanted, request, rows=key[0], past=key[1]) for key, together in members.items()]


def _group(
    parts: Sequence[tuple[int, Segment]],
    tokens: NDArray[np.int32],
    wanted: Sequence[int],
    request: Mapping[str, str],
    *,
    rows: int,
    past: int,
) -> Group:
    count, positions = len(parts), np.arange(past, past + rows)
    table = np.array([segment.pages[: pages_for(past + rows)] for _, segment in parts], np.int64)
    where = np.array([np.arange(begin, begin + rows) for begin, _ in parts])  # [sequences, rows], the row of the batch
    at = {int(row): place for place, row in enumerate(where.ravel())}
    asked = [(index, at[row]) for index, row in enumerate(wanted) if row in at]
    from_request = {
        "input_ids": tokens[where],
        "attention_mask": np.ones((count, past + rows)),
        POSITIONS: np.tile(positions, (count, 1)),
    }
    inputs: dict[str, NDArray[Any]] = {name: from_request[name].astype(dtype) for name, dtype in request.items()}
    inputs[PAGES] = table[:, : max(1, pages_for(past))]
    inputs[PAST] = np.array([past], np.int64)
    inputs[SLOTS] = np.stack([table[:, positions // PAGE], np.tile(positions % PAGE, (count, 1))], -1).reshape(-1, 2)
    inputs[TAKE] = np.array([place for _, place in asked] or [0], np.int64)  # where nobody asks, KV is what counts
    return Group(inputs, tuple(index for index, _ in asked))
