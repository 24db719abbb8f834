"""A ragged batch as the runs that ONNX blocks take: sequences of one length behind pasts of one length. Pure.

Graphs that others made have one batch axis and one axis of positions. Padding would make the ragged rest of a batch
fit, but whether a graph computes the same beside padding is the exporter's secret; a run for each pair of lengths is
right with every graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import ExecutionError
from blockrelay_worker.execution.batch import NamedTensors, Segment
from blockrelay_worker.execution.onnx.as_is.paged_graph import PAGES, PAST, SLOTS, TAKE
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels.specification import PAGE

#: The input of a request that says where its rows are.
POSITIONS = "position_ids"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows of a segment that run at once: `begin` is the first of them in the batch, `number` that of their segment,
    `given` what earlier stages made of them."""

    number: int
    begin: int
    segment: Segment
    given: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """What runs together. `inputs` by name, those of the request included; `wanted` are the indexes, in the batch's
    `wanted`, of the logits that come out, in order."""

    parts: tuple[Part, ...]
    inputs: dict[str, NDArray[Any]]
    wanted: tuple[int, ...]


def waves(segments: Sequence[Segment], *, one_by_one: bool) -> list[list[Part]]:
    """What runs one after the other.

    All at once; with `one_by_one` rows behind a past come one at a time, since the attention of such graphs takes
    several only where there are none before them.
    """
    sizes = [
        [1] * segment.rows if one_by_one and segment.first_position > 0 else [segment.rows] for segment in segments
    ]
    return _waves(segments, sizes, [[{}] * len(parts) for parts in sizes])


def handed_waves(
    segments: Sequence[Segment], tensors: Sequence[Sequence[NamedTensors]], *, one_by_one: bool
) -> list[list[Part]]:
    """The same behind a stage that has run the rows in the parts that `tensors` have. Raises ExecutionError where these
    are not the rows of the segments, or rows that must run one by one."""
    if len(tensors) != len(segments):
        raise ExecutionError(f"this stage takes tensors for each of {len(segments)} segments, and has {len(tensors)}")
    for index, (segment, parts) in enumerate(zip(segments, tensors, strict=True)):
        rows = [part.rows for part in parts]
        if sum(rows) != segment.rows or min(rows) < 1:
            raise ExecutionError(f"segment {index}: {segment.rows} rows, and tensors of {rows}")
        if one_by_one and segment.first_position > 0 and max(rows) > 1:
            raise ExecutionError(f"segment {index}: rows behind others run one by one, and tensors are of {rows}")
    return _waves(
        segments,
        [[part.rows for part in parts] for parts in tensors],
        [[part.arrays for part in parts] for parts in tensors],
    )


def _waves(
    segments: Sequence[Segment],
    sizes: Sequence[Sequence[int]],
    given: Sequence[Sequence[Mapping[str, NDArray[Any]]]],
) -> list[list[Part]]:
    """Each segment cut into parts of these sizes."""
    found: list[list[Part]] = []
    begin = 0
    for number, segment in enumerate(segments):
        position = segment.first_position
        for wave, (rows, theirs) in enumerate(zip(sizes[number], given[number], strict=True)):
            if len(found) == wave:
                found.append([])
            found[wave].append(Part(number, begin, replace(segment, rows=rows, first_position=position), theirs))
            begin, position = begin + rows, position + rows
    return found


def grouped(
    parts: Sequence[Part],
    tokens: NDArray[np.int32],
    wanted: Sequence[int],
    request: Mapping[str, str],
    *,
    single: bool = False,
    paged: bool = True,
) -> list[Group]:
    """The groups of a wave, in a batch whose rows have these `tokens`. `request`: the request's inputs and their
    dtypes; `single`: every sequence for itself; not `paged`: the blocks keep nothing. What parts were given is not
    among the inputs yet."""
    members: dict[tuple[int, ...], list[Part]] = {}
    for part in parts:
        key = (part.segment.rows, part.segment.first_position, *((part.begin,) if single else ()))
        members.setdefault(key, []).append(part)
    return [
        _group(together, tokens, wanted, request, rows=key[0], past=key[1], paged=paged)
        for key, together in members.items()
    ]


def _group(
    parts: Sequence[Part],
    tokens: NDArray[np.int32],
    wanted: Sequence[int],
    request: Mapping[str, str],
    *,
    rows: int,
    past: int,
    paged: bool,
) -> Group:
    count, positions = len(parts), np.arange(past, past + rows)
    where = np.array([np.arange(part.begin, part.begin + rows) for part in parts])  # [sequences, rows] of the batch
    at = {int(row): place for place, row in enumerate(where.ravel())}
    asked = [(index, at[row]) for index, row in enumerate(wanted) if row in at]
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
    inputs[TAKE] = np.array([place for _, place in asked] or [0], np.int64)  # where nobody asks, KV is what counts
    return Group(tuple(parts), inputs, tuple(index for index, _ in asked))
