"""Inputs and outputs of a step as fields and arrays of a device process's messages: rows of logits (whole, or the
largest), and tensors by name."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay_worker.execution.batch import NamedTensors
from blockrelay_worker.execution.selection import Largest, LogitRow


def packed_rows(rows: Sequence[LogitRow]) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Returns fields and arrays of a message for rows of logits.

    Fields: `counts`, how many largest logits each row has (0: it is whole), and `totals` of the rows that are not
    whole. Arrays: the ids and the logits of these rows, each joined into one array, then every whole row."""
    chosen = [row for row in rows if isinstance(row, Largest)]
    whole = [row for row in rows if not isinstance(row, Largest)]
    counts = [len(row.ids) if isinstance(row, Largest) else 0 for row in rows]
    ids, logits = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    ids, logits = ids + [row.ids for row in chosen], logits + [row.logits for row in chosen]
    arrays = [np.concatenate(ids), np.concatenate(logits), *whole]
    return {"counts": counts, "totals": [float(row.total) for row in chosen]}, arrays


def unpacked_rows(fields: Mapping[str, Any], arrays: Sequence[NDArray[Any]]) -> list[LogitRow]:
    """Returns the rows of logits from the fields and arrays that `packed_rows` returned, as views of `arrays`."""
    ids, logits, *rest = arrays
    whole, totals, at = iter(rest), iter(fields["totals"]), 0
    rows: list[LogitRow] = []
    for count in fields["counts"]:
        if count:
            rows.append(Largest(ids[at : at + count], logits[at : at + count], next(totals)))
        else:
            rows.append(next(whole))
        at += count
    return rows


def packed_tensors(segments: Sequence[Sequence[NamedTensors]]) -> tuple[list[Any], list[NDArray[Any]]]:
    """Returns a field and the arrays of a message for the tensors of each segment. Nothing is copied."""
    parts = [part for segment in segments for part in segment]
    fields = [[[part.rows, list(part.arrays)] for part in segment] for segment in segments]
    return fields, [array for part in parts for array in part.arrays.values()]


def unpacked_tensors(fields: Sequence[Any], arrays: Sequence[NDArray[Any]]) -> list[list[NamedTensors]]:
    """Returns the parts of each segment, from the field and all arrays that `packed_tensors` returned."""
    rest = iter(arrays)
    return [
        [NamedTensors(rows=rows, arrays={name: next(rest) for name in names}) for rows, names in segment]
        for segment in fields
    ]
