"""The exact linear layers in NumPy, compared with whole-number arithmetic."""

import numpy as np
import pytest

from blockrelay_worker.execution.cpu.exact_linears import EXACT_DEPTH, ExactGroupLinear, ExactLinear
from blockrelay_worker.kernels.float32 import fma


@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (64, 5), (EXACT_DEPTH, 3), (3 * EXACT_DEPTH + 17, 4100)])
def test_it_is_the_sum_of_whole_numbers_times_the_scale(depth: int, columns: int) -> None:
    random = np.random.default_rng(depth)
    u = random.integers(0, 256, (3, depth), dtype=np.uint8)
    q = random.integers(-128, 128, (depth, columns), dtype=np.int8)
    scale = random.random(columns, np.float32)
    # The ends of both ranges in one sum, with one odd part: the largest that float32 must not round on the way.
    u[0], q[:, 0] = 0, -128
    u[0, 0], q[0, 0] = 129, 1
    out = np.empty((3, columns), np.float32)
    ExactLinear(q, scale)(u, out)
    total = (u.astype(np.int64) - 128) @ q.astype(np.int64)
    np.testing.assert_array_equal(out, total.astype(np.float32) * scale)


def test_float32_holds_every_sum_of_one_block() -> None:
    highest = EXACT_DEPTH * 128 * 128
    whole = np.arange(highest - 1000, highest + 1)
    np.testing.assert_array_equal(whole.astype(np.float32).astype(np.int64), whole)
    assert int(np.float32(highest + 1)) != highest + 1  # a deeper block would not be exact


@pytest.mark.parametrize("largest", [1.0, 60000.0])
def test_groups_are_added_with_one_rounding_each(largest: float) -> None:
    """Against products of whole numbers and a plain order of k, for more columns than are multiplied at a time."""
    random = np.random.default_rng(7)
    depth, columns = 512, 1100
    u = random.integers(0, 256, (3, depth), dtype=np.uint8)
    q = random.integers(0, 16, (depth, columns))
    u[0], q[:, 0] = 0, 15  # the ends of both ranges
    shape, small = (depth // 32, columns), 10.0 ** -random.integers(0, 8, columns)
    gs, gm = ((random.uniform(-largest, largest, shape) * small).astype(np.float16) for _ in range(2))
    scale = random.random((3, depth // 32), np.float32)
    out = np.empty((3, columns), np.float32)
    ExactGroupLinear((q[0::2] | q[1::2] << 4).astype(np.uint8), gs, gm)(u, out, scale)
    acc = np.zeros((3, columns), np.float32)
    for group in range(depth // 32):
        values = u[:, 32 * group : 32 * group + 32].astype(np.int64) - 128
        factor, minimum, row = gs[group].astype(np.float32), gm[group].astype(np.float32), scale[:, group, None]
        acc = fma(values.sum(axis=1, keepdims=True).astype(np.float32) * row, minimum, acc)
        acc = fma((values @ q[32 * group : 32 * group + 32]).astype(np.float32), factor * row, acc)
    assert out.tobytes() == acc.tobytes()
