"""ONNX Runtime's products on the kernels' threads: the bits of the whole matrix, and no threads of their own."""

import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.model import ModelConfig, Precision
from blockrelay_converter.linear_graphs import graph
from blockrelay_worker.execution.cpu.exact_linears import ExactLinear
from blockrelay_worker.execution.cpu.products.fewer_columns import with_columns
from blockrelay_worker.execution.cpu.products.ort_linear import OrtLinear, Threads, column_ends, row_ends
from blockrelay_worker.kernels import Kernels, load_kernels, supported_variants


def _model(depth: int, columns: int) -> ModelConfig:
    """A model whose head has this shape."""
    return ModelConfig(
        name="one", family="llama", hidden_size=depth, layers=1, heads=1, kv_heads=1, head_dim=8, intermediate_size=8,
        vocab_size=columns, max_position=8, rms_norm_eps=1e-5, qkv_bias=False, qk_norm=False, eos_ids=(), bos_id=None,
        bos_token=None, eos_token=None,
    )  # fmt: skip


def _whole(content: bytes, weights: Mapping[str, NDArray[Any]], rows: NDArray[Any]) -> NDArray[np.float32]:
    """What one session with all columns makes of the rows."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_external_initializers(
        list(weights), [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    )
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: rows})[0])


@pytest.fixture(scope="module", params=["reference", *supported_variants()[:1]])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_kernels(3, variant=request.param)


@pytest.mark.parametrize("columns", [960, 16384, 16390])  # whole, in parts, with a rest
@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_parts_give_the_bits_of_the_whole(kernels: Kernels, precision: Precision, columns: int) -> None:
    dice, depth = np.random.default_rng(columns), 576
    weights: dict[str, NDArray[Any]]
    if precision == "fp32":
        weights = {"w": dice.standard_normal((depth, columns), np.float32)}
        given: NDArray[Any] = dice.standard_normal((300, depth), np.float32)
    else:
        weights = {
            "q": dice.integers(-64, 64, (depth, columns), np.int8),  # pairs that no CPU saturates
            "scale": dice.random(columns, np.float32),
        }
        given = dice.integers(0, 256, (300, depth), np.uint8)
    content = graph(_model(depth, columns), precision, "head")
    linear = OrtLinear(content, weights, threads=Threads(kernels, 3))
    found = np.full((301, columns), np.nan, np.float32)
    for count in (1, 2, 16, 70, 300):
        found[:] = np.nan
        linear(given[:count], found[:count])
        assert found[:count].tobytes() == _whole(content, weights, given[:count]).tobytes(), count
        assert np.isnan(found[count]).all(), "wrote behind its rows"
    if precision == "w8a8":
        expected = np.empty((300, columns), np.float32)
        ExactLinear(weights["q"], weights["scale"])(given, expected)
        assert found[:300].tobytes() == expected.tobytes()


@pytest.mark.parametrize(("precision", "kind"), [("fp32", "head"), ("w8a8", "head"), ("w8a8", "head.u8u8")])
def test_a_graph_for_fewer_columns_is_the_one_the_converter_would_write(precision: Precision, kind: str) -> None:
    # As deep as wide too: only the columns change
    for depth, columns, fewer in ((256, 256, 64), (576, 49152, 24576), (64, 200, 8)):
        found = with_columns(graph(_model(depth, columns), precision, kind), columns, fewer)
        assert found == graph(_model(depth, fewer), precision, kind)


def test_packed_dimensions_are_changed_too() -> None:
    # Given a graph by another writer of protobuf, which packs what may be packed: 1 (dims) as bytes
    content = graph(_model(256, 256), "fp32", "head")
    unpacked, packed = b"\x08\x80\x02\x08\x80\x02", b"\x0a\x04\x80\x02\x80\x02"
    assert content.count(unpacked) == 1
    shorter = content.replace(unpacked, packed)
    model = onnx.load_from_string(shorter)
    assert list(model.graph.initializer[0].dims) == [256, 256]
    found = onnx.load_from_string(with_columns(shorter, 256, 64)).graph
    assert list(found.initializer[0].dims) == [256, 64]


def test_matrices_are_cut_where_it_pays() -> None:
    assert column_ends(576, 960, 1, 16) == [960], "small ones stay whole"
    assert column_ends(4096, 4096, 1, 1) == [4096], "nobody to share with"
    ends = column_ends(2048, 16390, 1, 16)
    assert len(ends) == 16 and ends[-1] == 16390
    assert all(end % 64 == 0 for end in ends[:-1]) and ends == sorted(set(ends))
    assert len(column_ends(65536, 100, 4, 16)) == 1, "not finer than ONNX Runtime cuts"


def test_rows_are_cut_where_it_pays() -> None:
    assert row_ends(512, 1 << 36, 1, 1) == [512], "nobody to share with"
    assert row_ends(1, 1 << 36, 1, 16) == [1]
    assert row_ends(512, 1 << 26, 1, 16) == [512], "small products stay whole"
    assert row_ends(512, 1 << 30, 1, 2) == [64, 128, 192, 256, 320, 384, 448, 512]
    assert row_ends(512, 1 << 36, 2, 2) == [128, 256, 384, 512], "of each part"
    assert row_ends(40, 1 << 36, 1, 16) == [20, 40]


def test_products_start_no_threads(kernels: Kernels) -> None:
    before = len(os.listdir("/proc/self/task"))
    columns = 4096
    weights: dict[str, NDArray[Any]] = {"w": np.ones((256, columns), np.float32)}
    shared, content = Threads(kernels, 3), graph(_model(256, columns), "fp32", "head")
    linears = [OrtLinear(content, weights, threads=shared) for _ in range(8)]
    out = np.empty((2, columns), np.float32)
    for linear in linears:
        linear(np.ones((2, 256), np.float32), out)
    assert (out == 256).all()
    helpers = 2 if kernels.variant == "reference" else 0  # those of the reference kernels start when they are needed
    assert len(os.listdir("/proc/self/task")) <= before + helpers


def test_shared_work_is_done_once_each_and_its_errors_are_the_callers(kernels: Kernels) -> None:
    lock, done, names = threading.Lock(), list[int](), set[int]()
    everybody = threading.Barrier(2, timeout=20)

    def work(index: int) -> None:
        if index < 2:
            everybody.wait()  # two threads at a time, or never
        with lock:
            done.append(index)
            names.add(threading.get_ident())

    kernels.share(5, 1 << 30, work)
    assert sorted(done) == [0, 1, 2, 3, 4]
    assert len(names) > 1

    def fails(index: int) -> None:
        if index == 3:
            raise ValueError("three")

    for cost in (0, 1 << 30):
        with pytest.raises(ValueError, match="three"):
            kernels.share(5, cost, fails)
    kernels.share(0, 0, fails)
