"""Products of floats that are computed in parts: how many, the same numbers, and how much closer in float16."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from blockrelay_worker.execution.onnx.graphs.flavours import PAGED_IN_PARTS, FloatType
from blockrelay_worker.execution.onnx.graphs.graph import GraphBuilder
from blockrelay_worker.execution.onnx.graphs.linears import matmul, parts_of
from blockrelay_worker.execution.onnx.known_answers import row_error
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from tests.support.worker.onnx_devices import DEVICES, FLOAT16

LONGEST = PAGED_IN_PARTS.longest_sum
assert LONGEST is not None


@given(rows=st.integers(1, 40_000), longest=st.integers(64, 4096))
def test_parts_are_equal_short_enough_and_few(rows: int, longest: int) -> None:
    parts = parts_of(rows, longest)
    assert rows % parts == 0
    if parts > 1:
        assert rows // parts <= longest and rows // parts % 4 == 0
        assert not [fewer for fewer in range(1, parts) if rows % (4 * fewer) == 0 and rows // fewer <= longest]
    assert parts_of(rows, None) == 1


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [(576, 2), (2048, 4), (4096, 8), (5632, 11), (8192, 16), (11008, 32), (14336, 28), (4099, 1)],
)
def test_the_layers_of_real_models_are_cut(inputs: int, parts: int) -> None:
    assert parts_of(inputs, LONGEST) == parts


def multiplied(
    device: str, dtype: FloatType, x: NDArray[np.float32], w: NDArray[np.float32], longest: int | None
) -> float:
    """How far the worst row of the product is off on a device, as a part of its length."""
    (inputs, outputs), graph = w.shape, GraphBuilder(dtype)
    graph.input("x", TensorProto.FLOAT, ["R", inputs])
    graph.input("w", graph.type, w.shape)
    y = matmul(graph, graph.cast("x", graph.type, "narrow"), "w", w.shape, 0, "product", longest)
    graph.result("y", y, ["R", outputs])
    session = open_provider(device).session(graph.serialized("product"))
    (found,) = session.run(None, {"x": x, "w": w.astype(dtype)})
    return row_error(np.asarray(found), x.astype(np.float64) @ w.astype(dtype).astype(np.float64))


def random_layer(rows: int, inputs: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, inputs)).astype(np.float16).astype(np.float32)
    return x, (0.02 * random.standard_normal((inputs, 128))).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_a_product_in_parts_is_the_same_product(device: str, dtype: FloatType, rows: int) -> None:
    x, w = random_layer(rows, 1536)
    assert multiplied(device, dtype, x, w, LONGEST) < (1e-5 if dtype == "float32" else 5e-3)


@pytest.mark.parametrize("device", [pytest.param("webgpu:0", marks=FLOAT16)])
def test_long_sums_of_float16_lose_less_in_parts(device: str) -> None:
    x, w = random_layer(4, 8192)
    assert multiplied(device, "float16", x, w, LONGEST) < 5e-3 < multiplied(device, "float16", x, w, None)
