"""Recorded and replayed decode steps give what unrecorded ones give, or no step is recorded any more."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.onnx.compiled import captured
from blockrelay_worker.execution.onnx.compiled.captured import CapturedSteps
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider
from blockrelay_worker.execution.onnx.stage import OnnxStage
from tests.support.worker.onnx_devices import FLOAT16

PAGES = 24
#: Of logits up to 16 in float32, and in float16: a step is computed with others beside it, and a wider table.
ERRORS = {"float32": 2e-5, "float16": 0.1}
#: ONNX Runtime's CPU kernels record nothing: there steps have the shapes and the memory of recorded ones.
DEVICES = [
    ("cpu", "fp32"),
    pytest.param("webgpu:0", "fp32", marks=pytest.mark.software_gpu),
    pytest.param("webgpu:0", "fp16", marks=FLOAT16),
]


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MAX_GRAPHS", 3)


def load(provider: Provider, folder: BlockFolder, first: int, last: int, *, capture: bool = True) -> OnnxStage:
    return OnnxExecutors(provider, capture=capture).load(folder, first, last, pages=PAGES)


def steps_of(stage: OnnxStage) -> CapturedSteps:
    assert stage.captured is not None
    return stage.captured


def prompts() -> Batch:
    """Of three requests."""
    segments = [
        Segment(rows=20, first_position=0, pages=(3, 11)),
        Segment(rows=3, first_position=0, pages=(12,)),
        Segment(rows=30, first_position=0, pages=(7, 13, 14, 15, 16, 17, 18, 19, 20)),
    ]
    return Batch(segments=segments, tokens=np.arange(5, 58, dtype=np.int32), wanted=())


def decode(number: int, requests: Sequence[int], wanted: Sequence[int]) -> Batch:
    """The step of that number of some of them."""
    firsts, pages = (20, 3, 30), prompts().segments
    return Batch(
        segments=[Segment(rows=1, first_position=firsts[one] + number, pages=pages[one].pages) for one in requests],
        tokens=np.array([50 + 7 * number + one for one in requests], np.int32),
        wanted=wanted,
    )


WALK = [
    decode(0, (0, 1, 2), (0, 1, 2)),
    decode(1, (0, 1, 2), (2,)),
    decode(2, (2, 0), (1,)),
    decode(2, (1,), (0,)),
    decode(3, (1, 0, 2), ()),
    decode(4, (2, 1, 0), (2, 0)),
    decode(5, (0, 2), (0, 1)),
    decode(6, (0,), (0,)),
    decode(7, (0,), (0,)),
]


def walked(stage: OnnxStage) -> list[NDArray[Any]]:
    """Logits of decode steps behind prompts, and what the pages have then."""
    stage.run(prompts())
    found = [stage.run(batch).logits for batch in WALK]
    pages = stage.export_pages([3, 11, 12, 7, 13, 14])
    return [*(logits for logits in found if logits is not None), *(h for page in pages for pair in page for h in pair)]


@pytest.mark.parametrize(("device", "precision"), DEVICES)
def test_recorded_steps_give_what_the_others_give(request: pytest.FixtureRequest, device: str, precision: str) -> None:
    """Requests that come, go and change places, with logits of some; prompts in between are never recorded."""
    folder, provider = request.getfixturevalue(precision), open_provider(device)
    stage, other = load(provider, folder, 1, 5), load(provider, folder, 1, 5, capture=False)
    assert other.captured is None and steps_of(stage).graphs == 3
    already = steps_of(stage).repeated
    assert stage.details["recorded"] == "decode steps of 3 shapes"
    found, expected = walked(stage), walked(other)
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.astype(np.float32), right, rtol=0, atol=ERRORS[stage.details["dtype"]])
    assert steps_of(stage).repeated == already + len(WALK) and not steps_of(stage).off


@pytest.mark.parametrize(("device", "precision"), DEVICES)
def test_a_stage_in_the_middle_repeats_rows(request: pytest.FixtureRequest, device: str, precision: str) -> None:
    folder, provider = request.getfixturevalue(precision), open_provider(device)
    stage, other = load(provider, folder, 2, 3), load(provider, folder, 2, 3, capture=False)
    rows = np.random.default_rng(3).standard_normal((53, folder.model.hidden_size)).astype(np.float32)
    for one in (stage, other):
        one.run(Batch(segments=prompts().segments, hidden=rows))
    batch = Batch(segments=WALK[0].segments, hidden=rows[:3])
    already = steps_of(stage).repeated
    found, expected = stage.run(batch).hidden, other.run(batch).hidden
    assert found is not None and expected is not None and found.shape == (3, folder.model.hidden_size)
    np.testing.assert_allclose(found, expected, rtol=0, atol=ERRORS[stage.details["dtype"]])
    assert steps_of(stage).repeated == already + 1


def test_the_spare_page_is_nobodys(fp32: BlockFolder) -> None:
    """Sequences that fill a shape write there, and not into the pages of any request."""
    stage = load(CpuProvider(), fp32, 1, 5)
    stage.run(prompts())
    others = [page for page in range(PAGES) if page not in (3, 11, 12, 7, 13, 14)]
    before = stage.export_pages(others)
    stage.run(WALK[0])
    for page, same in zip(before, stage.export_pages(others), strict=True):
        assert all(
            np.array_equal(a, b) for one, two in zip(page, same, strict=True) for a, b in zip(one, two, strict=True)
        )
    assert stage.pool.pages == PAGES


def test_the_shape_not_used_for_longest_goes(fp32: BlockFolder) -> None:
    stage = load(CpuProvider(), fp32, 1, 5)
    steps = steps_of(stage)
    released: list[int] = []
    steps._release = lambda graph: released.append(graph.number)  # type: ignore[method-assign] # pyright: ignore
    stage.run(prompts())
    for requests in ((0,), (0, 1), (0, 1, 2)):  # shapes of 1, 2 and 4, which are there
        stage.run(decode(0, requests, range(len(requests))))
    assert released == [] and steps.graphs == 3
    eight = Batch(
        segments=[Segment(rows=1, first_position=0, pages=(page,)) for page in range(5)],
        tokens=np.arange(5, dtype=np.int32),
        wanted=range(5),
    )
    stage.run(eight)
    assert released == [1] and steps.graphs == 3


class Stale(CpuProvider):
    """Repeats old numbers: what is written into its memory later does not count."""

    name, device = "stale", "stale:0"

    def upload(self, session: ort.InferenceSession, array: NDArray[Any]) -> ort.OrtValue:
        value = super().upload(session, array)
        if array.dtype != np.float32 or array.ndim != 2:  # what says where rows are, and which
            return Unchanging(value)  # type: ignore[return-value]
        return value


class Unchanging(ort.OrtValue):
    """Keeps what it has."""

    def __init__(self, value: ort.OrtValue) -> None:
        super().__init__(value._ortvalue)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
        self._memory = value  # of which it is a view

    def update_inplace(self, data: Any) -> None:
        """Nothing."""


class Refusing(CpuProvider):
    """Cannot record."""

    name, device = "refusing", "refusing:0"

    def session(self, graph: bytes, *, quiet: bool = False, capture: bool = False) -> ort.InferenceSession:
        if capture:
            raise RuntimeError("no capture of this graph")
        return super().session(graph, quiet=quiet)


@pytest.mark.parametrize(
    ("provider", "reason"),
    [(Stale(), "a recorded step of 1 rows in 8 pages is off by"), (Refusing(), "no capture of this graph")],
)
def test_what_is_not_right_at_the_load_is_given_up(
    fp32: BlockFolder, provider: Provider, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stage, other = load(provider, fp32, 1, 5), load(CpuProvider(), fp32, 1, 5, capture=False)
    steps = steps_of(stage)
    assert reason in steps.off and steps.failures == 1 and steps.graphs == 0
    assert stage.details["recorded"].startswith("none: ")
    told = capsys.readouterr().out
    assert told.count("CAPTURE_OFF") == 1 and provider.device in told
    for found, right in zip(walked(stage), walked(other), strict=True):
        assert np.array_equal(found, right)
    assert steps.repeated == 0 and steps.failures == 1


def test_what_fails_while_it_serves_is_done_without(fp32: BlockFolder, capsys: pytest.CaptureFixture[str]) -> None:
    stage, other = load(CpuProvider(), fp32, 1, 5), load(CpuProvider(), fp32, 1, 5, capture=False)
    steps = steps_of(stage)
    for one in (stage, other):
        one.run(prompts())
        one.run(WALK[0])
    assert steps.repeated > 0

    def broken(*_: Any) -> Any:
        raise RuntimeError("replay failed")

    steps._run = broken  # type: ignore[method-assign] # pyright: ignore
    for batch in WALK[1:3]:
        found, right = stage.run(batch).logits, other.run(batch).logits
        assert found is not None and right is not None
        np.testing.assert_allclose(found, right, rtol=0, atol=2e-5)
    assert steps.failures == 1 and "replay failed" in steps.off and "CAPTURE_OFF" in capsys.readouterr().out


def test_a_clean_up_drops_what_was_recorded_and_it_comes_again(fp32: BlockFolder) -> None:
    stage, other = load(CpuProvider(), fp32, 1, 5), load(CpuProvider(), fp32, 1, 5, capture=False)
    for one in (stage, other):
        one.run(prompts())
        one.run(WALK[0])
    stage.clean_up()
    assert steps_of(stage).graphs == 0
    for batch in WALK[1:]:
        found, right = stage.run(batch).logits, other.run(batch).logits
        if found is not None and right is not None:
            np.testing.assert_allclose(found, right, rtol=0, atol=2e-5)
    assert steps_of(stage).graphs == 3 and not steps_of(stage).off


def test_rows_that_are_no_numbers_end_no_recording(fp32: BlockFolder) -> None:
    """They are a request's own."""
    stage = load(CpuProvider(), fp32, 2, 3)
    rows = np.full((1, fp32.model.hidden_size), np.nan, np.float32)
    bad = Batch(segments=[Segment(rows=1, first_position=0, pages=(0,))], hidden=rows)
    for _ in range(3):
        assert stage.run(bad).not_finite == (0,)
    assert not steps_of(stage).off and steps_of(stage).repeated >= 3


def test_what_is_recorded_while_it_serves_touches_nobodys_pages(fp32: BlockFolder) -> None:
    # Given a stage whose device repeats old numbers, which nobody has noticed
    stage, other = load(CpuProvider(), fp32, 1, 5), load(CpuProvider(), fp32, 1, 5, capture=False)
    steps = steps_of(stage)
    steps.close()
    steps._provider = Stale()  # pyright: ignore[reportPrivateUsage]
    for one in (stage, other):
        one.run(prompts())
    # When a step comes that has not been recorded yet
    found, right = stage.run(WALK[0]).logits, other.run(WALK[0]).logits
    # Then it is found out before the step is done, and no page of any request has changed
    assert steps.off and np.array_equal(found, right)  # type: ignore[arg-type] # pyright: ignore
    pages = range(8, PAGES)
    for page, same in zip(stage.export_pages(pages), other.export_pages(pages), strict=True):
        for halves, others in zip(page, same, strict=True):
            assert all(np.array_equal(half, as_without) for half, as_without in zip(halves, others, strict=True))


@pytest.mark.parametrize(("per_block", "capture"), [(True, True), (False, False), (False, None)])
def test_none_are_recorded_where_that_is_not_wanted(fp32: BlockFolder, per_block: bool, capture: bool | None) -> None:
    """Block by block, by force, or by what the provider is."""
    executors = OnnxExecutors(CpuProvider(), per_block=per_block, capture=capture)
    assert executors.load(fp32, 1, 5, pages=PAGES).captured is None


def test_the_head_alone_has_no_steps_to_record(fp32: BlockFolder) -> None:
    assert load(CpuProvider(), fp32, 5, 5).captured is None


@pytest.mark.software_gpu
@pytest.mark.driver_on_cpu
def test_a_driver_that_computes_on_the_cpu_records_nothing_by_itself(fp32: BlockFolder) -> None:
    """It is no faster by it (docs/gpu.md has the figures)."""
    provider = open_provider("webgpu:0")
    assert not provider.captures
    assert OnnxExecutors(provider).load(fp32, 3, 3, pages=PAGES).captured is None
