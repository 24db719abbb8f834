"""A ragged batch as runs that ONNX blocks of others can take: sequences of one length with pasts of one length. Pure.

Such graphs have one batch axis and one axis of positions. With padding they would take the rest of a ragged batch,
but only the exporter knows whether a graph computes the same beside padding. One run for each pair of lengths is right
with every graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError
from blockrelay_worker.execution.batch import NamedTensors, Segment
from blockrelay_worker.execution.onnx.as_is.paged_graph import PAGES, PAST, SLOTS, TAKE
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels.specification import PAGE

#: The input with the positions of a request's new tokens.
POSITIONS = "position_ids"


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPart:
    """Tokens of a segment that run at once. `number`: of their segment in the batch. `begin`: the first of them in the
    batch. `given`: tensors from earlier stages."""

    number: int
    begin: int
    segment: Segment
    given: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Parts that run together. `inputs`: by name, the request's inputs included. `wanted`: indexes into the batch's
    `wanted`, one for each row of logits that comes out, in order. If it is empty, one row comes out that has no use."""

    parts: tuple[SegmentPart, ...]
    inputs: dict[str, NDArray[Any]]
    wanted: tuple[int, ...]


def waves(segments: Sequence[Segment], *, one_by_one: bool) -> list[list[SegmentPart]]:
    """Returns the parts that run in each of several successive waves.

    All segments run in one wave. With `one_by_one`, tokens with a past come one at a time: the attention of such graphs
    takes several only without a past.
    """
    sizes = [
        [1] * segment.rows if one_by_one and segment.first_position > 0 else [segment.rows] for segment in segments
    ]
    return _waves(segments, [[NamedTensors(rows=rows, arrays={}) for rows in parts] for parts in sizes])


def handed_waves(
    segments: Sequence[Segment], tensors: Sequence[Sequence[NamedTensors]], *, one_by_one: bool
) -> list[list[SegmentPart]]:
    """Returns waves, as `waves` does, for a stage after others: the parts are those in which the earlier stage ran, as
    `tensors` shows.

    Raises ExecutionError if these are not the tokens of the segments, or hold several that must run one by one.
    """
    if len(tensors) != len(segments):
        raise ExecutionError(f"this stage takes tensors for each of {len(segments)} segments, and has {len(tensors)}")
    for index, (segment, parts) in enumerate(zip(segments, tensors, strict=True)):
        rows = [part.rows for part in parts]
        if sum(rows) != segment.rows or min(rows) < 1:
            raise ExecutionError(f"segment {index}: {segment.rows} rows, and tensors of {rows}")
        if one_by_one and segment.first_position > 0 and max(rows) > 1:
            raise ExecutionError(f"segment {index}: rows with a past run one by one, and tensors are of {rows}")
    return _waves(segments, tensors)


def _waves(segments: Sequence[Segment], tensors: Sequence[Sequence[NamedTensors]]) -> list[list[SegmentPart]]:
    """Cuts each segment into parts with the rows of its tensors."""
    result: list[list[SegmentPart]] = []
    begin = 0
    for number, (segment, parts) in enumerate(zip(segments, tensors, strict=True)):
        position = segment.first_position
        for wave, part in enumerate(parts):
            if len(result) == wave:
                result.append([])
            own = replace(segment, rows=part.rows, first_position=position)
            result[wave].append(SegmentPart(number, begin, own, part.arrays))
            begin, position = begin + part.rows, position + part.rows
    return result


def grouped(
    parts: Sequence[SegmentPart],
    tokens: NDArray[np.int32],
    wanted: Sequence[int],
    request: Mapping[str, str],
    *,
    single: bool = False,
    paged: bool = True,
) -> list[Group]:
    """Returns the groups of a wave: the parts of one have equally many new tokens, and equally many past ones.

    `tokens`: of the whole batch. `wanted`: the batch's rows whose logits are returned. `request`: dtypes by name of the
    request's inputs, out of input_ids, attention_mask and position_ids. `single`: each sequence runs alone. `paged`
    false: the blocks have no KV. Tensors from earlier stages are not among the inputs yet: the caller adds them.
    """
    members: dict[tuple[int, ...], list[SegmentPart]] = {}
    for part in parts:
        key = (part.segment.rows, part.segment.first_position, *((part.begin,) if single else ()))
        members.setdefault(key, []).append(part)
    return [
        _group(together, tokens, wanted, request, rows=key[0], past=key[1], paged=paged)
        for key, together in members.items()
    ]


def _group(
    parts: Sequence[SegmentPart],
    tokens: NDArray[np.int32],
    wanted: Sequence[int],
    request: Mapping[str, str],
    *,
    rows: int,
    past: int,
    paged: bool,
) -> Group:
    """Returns the group of `parts`, each with `rows` new tokens and a past of `past` tokens."""
    count, positions = len(parts), np.arange(past, past + rows)
    where = np.array([np.arange(part.begin, part.begin + rows) for part in parts])  # [sequences, rows] of the batch
    at = {int(row): place for place, row in enumerate(where.ravel())}
    places_of_wanted = [(index, at[row]) for index, row in enumerate(wanted) if row in at]
    from_request = {
        "input_ids": tokens[where],
        "attention_mask": np.ones((count, past + rows)),
        POSITIONS: np.tile(positions, (count, 1)),
    }
    inputs: dict[str, NDArray[Any]] = {name: from_request[name].astype(dtype) for name, dtype in request.items()}
    if paged:
        table = np.array([part.segment.pages[: pages_for(past + rows)] for part in parts], np.int64)
        places = np.tile(positions % PAGE, (count, 1))
        inputs[PAGES] = table[:, : max(1, pages_for(past))]
        inputs[PAST] = np.array([past], np.int64)
        inputs[SLOTS] = np.stack([table[:, positions // PAGE], places], -1).reshape(-1, 2)
    # The graph needs one row; without wanted ones only the KV counts.
    inputs[TAKE] = np.array([place for _, place in places_of_wanted] or [0], np.int64)
    return Group(tuple(parts), inputs, tuple(index for index, _ in places_of_wanted))
