"""Linear layers with two backends, our kernels and ONNX Runtime, as on CPUs with AMX: both give the same bits."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu import loading
from blockrelay_worker.execution.cpu.backends import both_linear
from blockrelay_worker.execution.cpu.backends.both_linear import NEVER, BothLinear, faster_from, fits_twice
from blockrelay_worker.execution.cpu.backends.ort_linear import OrtLinear
from blockrelay_worker.execution.cpu.loading import load_stage
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.kernels.arguments import F32, U8
from blockrelay_worker.kernels.interface import Linear
from blockrelay_worker.kernels.libraries import AVX_VNNI, VNNI, cpu_features

KERNELS = load_kernels(2)
needs_products = pytest.mark.skipif(
    not KERNELS.has_matmul or not cpu_features() & (VNNI | AVX_VNNI),
    reason="ONNX Runtime's product of signed weights saturates on CPUs without VNNI, and has other bits there",
)


def _seconds(ours: Callable[[int], float], ort: Callable[[int], float]) -> Callable[[int], tuple[float, float]]:
    return lambda rows: (ours(rows), ort(rows))


def test_onnx_runtime_serves_from_where_it_is_faster_on() -> None:
    rows = (1, 4, 16, 64)
    assert faster_from(rows, _seconds(lambda n: n, lambda n: 10 + 0.5 * n)) == 64
    assert faster_from(rows, _seconds(lambda n: n, lambda n: 2 + 0.5 * n)) == 16
    assert faster_from(rows, _seconds(lambda n: n, lambda n: 0.1)) == 1
    assert faster_from(rows, _seconds(lambda n: n, lambda n: 0.98 * n)) == NEVER, "hardly faster is not worth it"
    assert faster_from(rows, _seconds(lambda n: n, lambda n: 0.1 if n == 4 else 100)) == NEVER, "an outlier"


def test_slow_products_are_not_measured_for_fewer_rows_than_needed() -> None:
    asked: list[int] = []

    def seconds(rows: int) -> tuple[float, float]:
        asked.append(rows)
        return 1.0, 2.0

    assert faster_from((1, 4, 16), seconds) == NEVER
    assert asked == [16]


def test_both_fit_where_a_quarter_of_what_is_left_holds_the_second() -> None:
    assert fits_twice(1, 10 + 9, 10) is True
    assert fits_twice(1, 10 + 8, 10) is False, "8 - 1 are left, and two copies need more than a quarter of that"
    assert fits_twice(1 << 30, 0, 0) is False


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes the times of a CPU on which ONNX Runtime is faster from 20 rows on."""

    def seconds(product: Linear, rows: U8, out: F32) -> float:
        product(rows, out)
        return 20.0 if isinstance(product, OrtLinear) else float(len(rows))

    monkeypatch.setattr(both_linear, "_seconds", seconds)


def _logits(stage: StageExecutor, rows: int) -> NDArray[np.float32]:
    tokens = (np.arange(rows, dtype=np.int32) * 7) % stage.folder.model.vocab_size
    batch = Batch(
        segments=[Segment(rows=rows, first_position=0, pages=list(range(-(-rows // 16))))],
        tokens=tokens,
        wanted=range(rows),
    )
    logits = stage.run(batch).logits
    assert logits is not None
    return logits.copy()


_open: list[StageExecutor] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Closes the stages of each test: another one with the same blocks would share theirs, and try nothing."""
    yield
    while _open:
        _open.pop().close()


def _load(folder: BlockFolder, *, tiles: bool) -> StageExecutor:
    _open.append(load_stage(folder, 1, folder.model.blocks, pages=8, threads=2, kernels=KERNELS, tiles=tiles))
    return _open[-1]


def _twice(stage: StageExecutor) -> list[BothLinear]:
    return [linear for linear in stage.linears if isinstance(linear, BothLinear)]


@needs_products
def test_with_tiles_many_rows_are_onnx_runtimes_and_no_bit_shows_it(
    w8a8: BlockFolder, timed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, ours = _load(w8a8, tiles=True), _load(w8a8, tiles=False)
    assert (stage.backend, ours.backend) == ("both", "native")
    assert {linear.ort_from for linear in _twice(stage)} == {64}
    assert stage.details["products"] == "native, u8s8 from 64 rows"
    assert stage.capabilities.numerics_id == ours.capabilities.numerics_id
    served: list[int] = []
    right = OrtLinear.__call__

    def noted(self: OrtLinear, rows: NDArray[Any], out: NDArray[np.float32]) -> None:
        served.append(len(rows))
        right(self, rows, out)

    monkeypatch.setattr(OrtLinear, "__call__", noted)
    for rows in (1, 63, 64, 100):
        for _ in range(2):  # the second time by a program, where there is one
            assert _logits(stage, rows).tobytes() == _logits(ours, rows).tobytes(), rows
    assert set(served) == {64, 100}


@needs_products
def test_onnx_runtimes_product_is_given_up_if_slower(w8a8: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both_linear, "_seconds", lambda product, _rows, _out: float(isinstance(product, OrtLinear)))
    stage = _load(w8a8, tiles=True)
    assert [linear.ort for linear in _twice(stage)] == [None] * len(list(stage.linears))
    assert stage.details["products"] == "native, u8s8 from never rows"
    assert _logits(stage, 100).tobytes() == _logits(_load(w8a8, tiles=False), 100).tobytes()


@needs_products
def test_products_are_settled_by_measurement(w8a8: BlockFolder) -> None:
    stage = _load(w8a8, tiles=True)
    assert all(linear.ort_from in (*both_linear.ROWS, NEVER) for linear in _twice(stage))
    assert _logits(stage, 100).tobytes() == _logits(_load(w8a8, tiles=False), 100).tobytes()


@needs_products
@pytest.mark.parametrize("whose", ["ort", "ours"])
def test_each_of_the_two_is_proved_before_it_serves(
    w8a8: BlockFolder, timed: None, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    # Given products of one kind that are wrong on this CPU
    def wrong(_self: object, _rows: NDArray[Any], out: NDArray[np.float32]) -> None:
        out.fill(1)

    if whose == "ort":
        monkeypatch.setattr(OrtLinear, "__call__", wrong)
        assert _load(w8a8, tiles=True).backend == "native"
    else:
        monkeypatch.setattr("blockrelay_worker.kernels.matmuls.PackedMatmul.__call__", wrong)
        assert _load(w8a8, tiles=True).backend in ("u8s8", "u8u8")


@needs_products
def test_where_memory_is_short_ours_are_there_alone(w8a8: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available_bytes", lambda: 1 << 20)
    assert _load(w8a8, tiles=True).backend == "native"


@needs_products
def test_int4_products_have_no_second_kind(w4a8: BlockFolder) -> None:
    assert _load(w4a8, tiles=True).backend == "native"
