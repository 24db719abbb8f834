"""NaN and infinities in a block's outputs are faults, except minus infinity in masks."""

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay_worker.execution.onnx.as_is.finite import not_finite

INF, NAN = np.inf, np.nan
LEAST = float(np.finfo(np.float16).min)


@pytest.mark.parametrize(
    ("rows", "bad"),
    [
        ([[0.5, -3.0]], 0),
        ([[0.5, NAN], [INF, -INF]], 3),
        ([[0.0, -INF], [0.0, 0.0]], 0),  # a mask
        ([[0.0, LEAST], [-2.0, -INF]], 0),  # one that leans
        ([[0.0, -INF], [-INF, -INF]], 3),  # a row that may look nowhere
        ([[0.5, -INF], [0.0, 0.0]], 1),
        ([[0.0, -INF], [NAN, 0.0]], 2),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_floats(rows: list[list[float]], bad: int, dtype: str) -> None:
    assert not_finite(np.array(rows, dtype)) == bad


@pytest.mark.parametrize("array", [np.array([3, -1]), np.array([True]), np.empty((0, 4), np.float32)])
def test_nothing_is_wrong_with_what_is_no_float(array: NDArray[np.generic]) -> None:
    assert not_finite(array) == 0


def test_a_single_number_is_no_mask() -> None:
    assert not_finite(np.array(-INF)) == 1
