"""A ragged batch as the arrays that a `plain` graph takes. Pure."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.batch import Segment
from blockrelay_worker.kernels.specification import PAGE


def plain_inputs(segments: Sequence[Segment]) -> dict[str, NDArray[Any]]:
    """Inputs of `graphs.stage_graph` by name, of segments whose rows are those of the batch in order."""
    rows = np.array([segment.rows for segment in segments])
    first = np.array([segment.first_position for segment in segments])
    count, longest = len(segments), int(rows.max())
    pages = -(-(first + rows) // PAGE)
    table = np.zeros((count, int(pages.max())), np.int64)
    for index, segment in enumerate(segments):
        table[index, : pages[index]] = segment.pages[: pages[index]]
    sequence = np.repeat(np.arange(count), rows)  # [R]
    begins = np.cumsum(rows) - rows
    step = np.arange(rows.sum()) - begins[sequence]
    positions = first[sequence] + step
    padded, reach = np.zeros((count, longest), np.int64), np.zeros((count, longest), np.float32)
    padded[sequence, step] = np.arange(rows.sum())
    reach[sequence, step] = positions
    return {
        "positions": positions,
        "slots": (table[sequence, positions // PAGE] * PAGE + positions % PAGE)[:, None],
        "rows": padded,
        "back": sequence * longest + step,
        "reach": reach,
        "table": table,
        "seen": np.arange(table.shape[1] * PAGE, dtype=np.float32),
    }
