"""Blocks of one graph, measured one by one now and then."""

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.batch import Batch, Segment, StageOutput
from blockrelay_worker.execution.onnx.block_times import EVERY
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.execution.onnx.stage import OnnxStage
from blockrelay_worker.execution.onnx.weights.arrays import block_weights
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from tests.support.worker.onnx_devices import NAMES

PROMPTS = Batch(
    segments=[
        Segment(rows=20, first_position=0, pages=(3, 1)),
        Segment(rows=3, first_position=0, pages=(2,)),
    ],
    tokens=np.arange(5, 28, dtype=np.int32),
    wanted=range(23),
)
BEHIND = Batch(
    segments=[
        Segment(rows=1, first_position=20, pages=(3, 1)),
        Segment(rows=15, first_position=3, pages=(2, 0)),
    ],
    tokens=np.arange(50, 66, dtype=np.int32),
    wanted=range(16),
)


@pytest.fixture(scope="module", params=NAMES)
def executors(request: pytest.FixtureRequest) -> OnnxExecutors:
    """Of one device."""
    return OnnxExecutors(open_provider(request.param))


def measured(stage: OnnxStage, batch: Batch) -> StageOutput:
    stage._times.measure_next()  # pyright: ignore[reportPrivateUsage]
    output = stage.run(batch)
    assert not output.estimated
    return output


def shares(output: StageOutput) -> list[float]:
    assert list(output.seconds) == [f"block_{block}" for block in range(1, 6)]
    return [seconds / sum(output.seconds.values()) for seconds in output.seconds.values()]


def test_a_stage_knows_the_shares_of_its_blocks_from_its_load_on(executors: OnnxExecutors, fp32: BlockFolder) -> None:
    output = executors.load(fp32, 1, 5, pages=8).run(PROMPTS)
    assert output.estimated and len(set(output.seconds.values())) == 5, "no even parts"


def test_one_step_in_so_many_is_measured_and_divides_those_behind(fp32: BlockFolder) -> None:
    stage = OnnxExecutors(CpuProvider()).load(fp32, 1, 5, pages=8)
    measured(stage, PROMPTS)
    steps = [stage.run(BEHIND) for _ in range(EVERY + 1)]
    assert [number for number, step in enumerate(steps) if not step.estimated] == [EVERY - 1]
    before, now, behind = (shares(step) for step in steps[-3:])
    assert before == pytest.approx(shares(steps[0])) and behind == pytest.approx(now) and now != before


@pytest.mark.parametrize(("first", "last"), [(1, 5), (2, 4), (3, 5)])
def test_block_by_block_the_result_is_the_same(
    executors: OnnxExecutors, fp32: BlockFolder, first: int, last: int
) -> None:
    """And so is what comes to lie in the pages, for the steps behind."""
    together, apart = (executors.load(fp32, first, last, pages=8) for _ in range(2))
    for batch in (PROMPTS, BEHIND):
        if first > 1:
            assert batch.tokens is not None
            rows = np.random.default_rng(7).standard_normal((len(batch.tokens), fp32.model.hidden_size))
            batch = Batch(segments=batch.segments, hidden=rows.astype(np.float32), wanted=batch.wanted)
        one, other = together.run(batch), measured(apart, batch)
        for found, expected in ((other.hidden, one.hidden), (other.logits, one.logits)):
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    for page, other_page in zip(together.export_pages([3, 1, 2]), apart.export_pages([3, 1, 2]), strict=True):
        for halves, others in zip(page, other_page, strict=True):
            for half, other_half in zip(halves, others, strict=True):
                np.testing.assert_allclose(half, other_half, rtol=0, atol=2e-5)


def test_sessions_of_blocks_have_no_weights_of_their_own(executors: OnnxExecutors, fp32: BlockFolder) -> None:
    stage = executors.load(fp32, 1, 5, pages=8)
    before = measured(stage, PROMPTS).logits
    value = stage._held["block_2/down"]  # pyright: ignore[reportPrivateUsage]
    weights = block_weights(fp32, 2, "float32")["down"]
    value.update_inplace(np.zeros_like(weights))
    apart, together = measured(stage, PROMPTS).logits, stage.run(PROMPTS).logits
    value.update_inplace(weights)  # which other stages have too
    assert before is not None and apart is not None and together is not None
    assert np.abs(apart - before).max() > 1e-2
    np.testing.assert_allclose(apart, together, rtol=0, atol=2e-5)


def test_a_block_alone_is_measured_always(fp32: BlockFolder) -> None:
    stage = OnnxExecutors(CpuProvider()).load(fp32, 1, 1, pages=8)
    assert not any(stage.run(PROMPTS).estimated for _ in range(3))


@pytest.mark.parametrize("device", NAMES)
def test_per_block_measures_every_step_under_a_numerics_id_of_its_own(fp32: BlockFolder, device: str) -> None:
    apart, together = OnnxExecutors(open_provider(device), per_block=True), OnnxExecutors(open_provider(device))
    assert apart.numerics_id(fp32.manifest) != together.numerics_id(fp32.manifest)
    stage, other = (one.load(fp32, 1, 5, pages=8) for one in (apart, together))
    for batch in (PROMPTS, BEHIND):
        output, expected = stage.run(batch), other.run(batch)
        assert not output.estimated and expected.estimated
        assert output.logits is not None and expected.logits is not None
        np.testing.assert_allclose(output.logits, expected.logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("per_block", [True, False])
def test_the_process_of_a_device_tells_which_times_are_estimates(fp32: BlockFolder, per_block: bool) -> None:
    executors = DeviceExecutors(fp32, Gpu("cpu", 5.0, per_block=per_block))
    try:
        assert executors.load(fp32, 1, 5, pages=8).run(PROMPTS).estimated != per_block
    finally:
        executors.close()
