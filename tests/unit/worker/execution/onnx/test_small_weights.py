"""Weights of 8 and 4 bits stay small on a device that multiplies by them rightly, and are the same numbers."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.plan import Stage
from blockrelay_worker.execution.onnx import loading
from blockrelay_worker.execution.onnx.graphs import linears
from blockrelay_worker.execution.onnx.graphs.flavours import FloatType
from blockrelay_worker.execution.onnx.graphs.graph import GraphBuilder
from blockrelay_worker.execution.onnx.known_answers import PAGES_NEEDED, check, known_answers
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.probe import can_multiply
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.execution.onnx.weights.arrays import block_weights, forms_of
from tests.support.worker.onnx_devices import CHOSEN, DEVICES

FOLDERS = ["w8a8", "w4a8", "mixed"]


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest) -> BlockFolder:
    return request.getfixturevalue(request.param)


def widened(small: Mapping[str, NDArray[Any]], kind: str, rows: int) -> NDArray[np.float64]:
    """[K, N], by what the operator's documents say."""
    packed, scales = small[kind], small[f"{kind}.scales"].astype(np.float64)
    numbers = packed - 128.0
    if packed.shape[2] == 16:
        numbers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*scales.shape, 32) - 8.0
    weights = numbers * scales[:, :, None]
    if (shared := small.get(f"{kind}.minimums")) is not None:
        weights += shared.T[:, :, None]
    return weights.reshape(len(packed), -1)[:, :rows].T


def test_no_weight_changes(folder: BlockFolder) -> None:
    layers = 0
    for block, form in forms_of(folder.manifest, (4, 8)).items():
        if not form.bits:
            continue
        small, wide = (block_weights(folder, block, "float32", each) for each in (form, form._replace(bits=0)))
        parts = ["scales"] if form.bits == 8 else ["scales", "minimums"]
        kinds = wide.keys() & set(linears.LINEARS)
        assert small.keys() - wide.keys() == {f"{kind}.{part}" for kind in kinds for part in parts}
        for name, array in wide.items():
            if name in linears.LINEARS:
                found, smallest = widened(small, name, len(array)), 1e-7 * np.abs(array).max()
                np.testing.assert_allclose(found, array, rtol=1e-6, atol=smallest if form.bits == 4 else 0)
                layers += 1
            else:
                assert small[name].tobytes() == array.tobytes()
    assert layers >= 4


@pytest.mark.parametrize(("device", "dtype"), CHOSEN)
def test_a_stage_with_small_weights_computes_what_the_reference_does(
    device: str, dtype: str, folder: BlockFolder
) -> None:
    executors, blocks = OnnxExecutors(open_provider(device)), folder.model.blocks
    stage = executors.load(folder, 1, blocks, pages=PAGES_NEEDED)
    assert stage.details["dtype"] == dtype and "bits" in stage.details["small weights"]
    tolerance = executors.tolerance(folder.manifest)
    check(stage, known_answers(folder, 1, blocks, loading.reference), where=device, tolerance=tolerance)
    # And takes what was said
    assert stage.weight_bytes == executors.memory(folder).weight_bytes(Stage(first=1, last=blocks))
    stage.close()


@pytest.mark.parametrize(("kind", "share"), [("w8a8", 0.3), ("w4a8", 0.2)])
def test_a_linear_layer_takes_a_quarter_or_an_eighth_and_its_factors(
    kind: str, share: float, request: pytest.FixtureRequest
) -> None:
    folder: BlockFolder = request.getfixturevalue(kind)
    head = folder.model.blocks  # the head and one norm
    small = OnnxExecutors(CpuProvider()).memory(folder).weight_bytes(Stage(first=head, last=head))
    assert small < share * loading.reference(folder, head).weight_bytes


def test_a_device_that_multiplies_wrongly_has_them_widened(
    monkeypatch: pytest.MonkeyPatch, w8a8: BlockFolder, fp32: BlockFolder
) -> None:
    right = OnnxExecutors(CpuProvider())
    # Given a kernel that is off by a hundredth
    matmul = linears.matmul

    def wrong(
        graph: GraphBuilder,
        x: str,
        weights: str,
        shape: tuple[int, int],
        bits: int,
        output: str,
        longest: int | None = None,
        count: str = "R",
    ) -> str:
        right = matmul(graph, x, weights, shape, bits, output, longest, count)
        return graph.node("Mul", [right, graph.number(1.01)], f"{output}_wrong") if bits else right

    monkeypatch.setattr(linears, "matmul", wrong)
    assert not can_multiply(CpuProvider(), 8, "float32")
    executors = OnnxExecutors(CpuProvider())
    stage = executors.load(w8a8, 1, 2, pages=PAGES_NEEDED)
    monkeypatch.undo()
    # Then the stage computes rightly, with the memory that it takes, under a name of its own
    assert "small weights" not in stage.details
    assert (
        stage.weight_bytes
        == executors.memory(w8a8).weight_bytes(Stage(first=1, last=2))
        > right.memory(w8a8).weight_bytes(Stage(first=1, last=2))
    )
    check(stage, known_answers(w8a8, 1, 2, loading.reference), where="cpu", tolerance=1e-5)
    assert executors.numerics_id(w8a8.manifest) != right.numerics_id(w8a8.manifest)
    assert executors.numerics_id(fp32.manifest) == right.numerics_id(fp32.manifest)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_whether_a_device_multiplies_by_them_is_asked(device: str, dtype: FloatType, bits: int) -> None:
    assert can_multiply(open_provider(device), bits, dtype)


@pytest.mark.parametrize(
    "spoil", [lambda graph: graph.replace(b"MatMulNBits", b"MatMulNBitz"), lambda graph: b""], ids=["unknown", "broken"]
)
def test_a_provider_without_the_operator_has_them_widened(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[bytes], bytes]
) -> None:
    graph = linears.matmul_graph
    monkeypatch.setattr(linears, "matmul_graph", lambda *about: spoil(graph(*about)))
    assert not can_multiply(CpuProvider(), 8, "float32")
