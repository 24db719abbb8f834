"""Packed weights are what ONNX Runtime's MatMulNBits multiplies with."""

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from blockrelay_converter.onnx_source.unpacking import as_groups, unpacked, zero_points
from blockrelay_converter.quantisation.groups import group_values

ROWS, INPUTS = 6, 96


def kernel(q: NDArray[Any], scales: NDArray[Any], zeros: NDArray[Any] | None, bits: int, group: int) -> NDArray[Any]:
    """[rows, inputs]: what comes out for each input alone."""
    constants = {"q": q, "scales": scales} | ({} if zeros is None else {"zeros": zeros})
    node = helper.make_node(
        "MatMulNBits", ["x", *constants], ["y"], domain="com.microsoft", K=INPUTS, N=ROWS, bits=bits, block_size=group
    )
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph([node], "one", values[:1], values[1:], initializers)
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: Any = session.run(None, {"x": np.eye(INPUTS, dtype=np.float32)})[0]
    return found.T


@pytest.mark.parametrize("with_zeros", [False, True])
@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_the_kernels(bits: int, group: int, with_zeros: bool) -> None:
    random = np.random.default_rng(bits * group)
    groups = -(-INPUTS // group)
    q = random.integers(0, 256, (ROWS, groups, group * bits // 8), np.uint8)
    scales = random.uniform(0.1, 1, (ROWS, groups)).astype(np.float32)
    zeros = random.integers(0, 256, (ROWS, -(-groups * bits // 8)), np.uint8) if with_zeros else None
    wide = unpacked(q, scales, zero_points(zeros, bits=bits, rows=ROWS, groups=groups), bits=bits, inputs=INPUTS)
    expected = kernel(q, scales.reshape(-1), None if zeros is None else zeros.reshape(-1), bits, group)
    assert wide.shape == (ROWS, INPUTS)
    np.testing.assert_allclose(wide, expected, rtol=1e-6, atol=1e-6)


def packed(scales: NDArray[np.float32], *, zero: float = 8, group: int = 32) -> Any:
    q = np.random.default_rng(3).integers(0, 256, (ROWS, INPUTS // group, group // 2), np.uint8)
    zeros = np.full((ROWS, INPUTS // group), zero, np.float32)
    return q, np.broadcast_to(scales, zeros.shape), zeros


@pytest.mark.parametrize(
    ("zero", "bits"),
    # the bits of a scale's fraction for which float16 holds -zero * scale
    [(8, 10), (0, 10), (1, 10), (4, 10), (7, 7), (15, 6), (10, 7), (8.5, 5)],
)
def test_groups_are_the_same_numbers(zero: float, bits: int) -> None:
    scales = np.random.default_rng(5).integers(-(2 << bits), 2 << bits, (ROWS, 3)).astype(np.float32) * 2.0**-bits
    scales[2], scales[3, 1] = 0, 2.0**-14
    q, wide, zeros = packed(scales, zero=zero)
    found = as_groups(q, wide, zeros)
    assert found is not None
    assert np.array_equal(group_values(*found), unpacked(q, scales, zeros, bits=4, inputs=INPUTS))
    assert np.array_equal(found[1], scales.T) and not np.signbit(found[2][found[2] == 0]).any()


def test_each_group_may_have_its_own_zero_point() -> None:
    q, scales, zeros = packed(np.array([[0.5, 2, 1]], np.float32))
    zeros = np.random.default_rng(6).integers(0, 16, zeros.shape).astype(np.float32)
    found = as_groups(q, scales, zeros)
    assert found is not None
    assert np.array_equal(group_values(*found), unpacked(q, scales, zeros, bits=4, inputs=INPUTS))


@pytest.mark.parametrize(
    "case",
    [
        packed(np.array([[1 + 2**-12]], np.float32)),
        packed(np.array([[1, 2**-30, 1]], np.float32)),
        packed(np.array([[1, 1, 1 + 2**-10]], np.float32), zero=7),
        packed(np.array([[1e4]], np.float32), zero=8),
        packed(np.array([[1e5]], np.float32), zero=0),
        packed(np.array([[1]], np.float32), group=16),
        packed(np.array([[np.inf]], np.float32)),
    ],
)
def test_what_would_be_rounded_is_no_groups(case: Any) -> None:
    assert as_groups(*case) is None
