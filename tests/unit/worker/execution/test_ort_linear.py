"""Linear layers by ONNX Runtime on one pool of threads: bits of its Python sessions, few threads, bounded memory."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.model import ModelConfig, Precision
from blockrelay.errors import ExecutionError
from blockrelay_converter.linear_graphs import graph
from blockrelay_worker.execution.cpu.backends.ort_linear import OrtLinear
from blockrelay_worker.execution.cpu.backends.ort_runtime import shared_runtime
from blockrelay_worker.execution.cpu.exact_linears import ExactLinear


def _model(depth: int, columns: int) -> ModelConfig:
    """A model whose head has this shape."""
    return ModelConfig(
        name="one", family="llama", hidden_size=depth, layers=1, heads=1, kv_heads=1, head_dim=8, intermediate_size=8,
        vocab_size=columns, max_position=8, rms_norm_eps=1e-5, qkv_bias=False, qk_norm=False,
    )  # fmt: skip


def _whole(content: bytes, weights: Mapping[str, NDArray[Any]], rows: NDArray[Any]) -> NDArray[np.float32]:
    """Returns the result of one session with all columns for the rows."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_external_initializers(
        list(weights), [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    )
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {session.get_inputs()[0].name: rows})[0])


@pytest.mark.parametrize("columns", [960, 16384, 16390])
@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_the_bits_are_those_of_a_session_of_pythons(precision: Precision, columns: int) -> None:
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
    linear = OrtLinear(content, weights, runtime=shared_runtime(3))
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


CODE = """
import os, sys
import numpy as np
from blockrelay_worker.execution.cpu.backends.ort_linear import OrtLinear
from blockrelay_worker.execution.cpu.backends.ort_runtime import shared_runtime

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def use():
    linears = [OrtLinear(content, {"w": ones}, runtime=shared_runtime(3)) for _ in range(8)]
    for linear in linears:
        linear(np.ones((2, 1024), np.float32), out)
    assert (out == 1024).all()

content, ones, out = sys.stdin.buffer.read(), np.ones((1024, 4096), np.float32), np.empty((2, 4096), np.float32)
threads, held = len(os.listdir("/proc/self/task")), resident()
use()
print(len(os.listdir("/proc/self/task")) - threads, shared_runtime(3) is shared_runtime(9))
for _ in range(8):
    use()
# 9 times 128 MiB of packed weights were made. ONNX Runtime keeps up to 3 of them for its next session.
print(resident() - held < 5 * 128 << 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts /proc/self/task")
def test_sessions_share_one_pool_and_give_back_their_memory() -> None:
    content = graph(_model(1024, 4096), "fp32", "head")
    done = subprocess.run([sys.executable, "-c", CODE], input=content, capture_output=True, check=True, timeout=60)
    assert done.stdout.split() == [b"2", b"True", b"True"]


def test_what_onnx_runtime_refuses_is_said_in_its_words() -> None:
    runtime = shared_runtime(2)
    with pytest.raises(ExecutionError, match="protobuf"):
        runtime.session(b"no graph", {})
    content = graph(_model(64, 64), "fp32", "head")
    with pytest.raises(ExecutionError, match="dimensions do not match"):
        OrtLinear(content, {"w": np.ones((64, 32), np.float32)}, runtime=runtime)
    linear = OrtLinear(content, {"w": np.ones((64, 64), np.float32)}, runtime=runtime)
    with pytest.raises(ExecutionError, match="dimensions"):
        linear(np.ones((1, 63), np.float32), np.empty((1, 64), np.float32))
