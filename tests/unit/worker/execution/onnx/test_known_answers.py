"""A device whose numbers are wrong takes no work."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.errors import KnownAnswerMismatch
from blockrelay.settings import BUNDLED_MODEL
from blockrelay_worker.execution.batch import Batch, StageOutput
from blockrelay_worker.execution.executor import Executor, PageContent
from blockrelay_worker.execution.fault_injection import WrappingExecutor
from blockrelay_worker.execution.onnx.known_answers import (
    PAGES_NEEDED,
    Answers,
    check,
    furthest_row,
    known_answers,
    worst,
)
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider
from tests.support.worker.onnx_devices import FLOAT16

REFERENCE = OnnxExecutors(CpuProvider())


def answers(folder: BlockFolder, first: int, last: int) -> Answers:
    return known_answers(folder, first, last, lambda f, block: REFERENCE.load(f, block, block, pages=PAGES_NEEDED))


class Wrong(WrappingExecutor):
    """Spoils, by a tenth, the rows of a request that `where` chooses: of those of a batch, whose requests have so many
    rows behind so many."""

    def __init__(self, executor: Executor, where: Callable[[int, int, int], slice | None]) -> None:
        super().__init__(executor)
        self._where = where

    def run(self, batch: Batch) -> StageOutput:
        output = super().run(batch)
        result = output.hidden if output.logits is None else output.logits
        assert result is not None
        at = 0
        for segment in batch.segments:
            spoilt = self._where(segment.rows, segment.first_position, len(batch.segments))
            if spoilt is not None:
                result[at : at + segment.rows][spoilt] *= np.float32(1.1)
            at += segment.rows
        return output


class Turned(WrappingExecutor):
    """Gives pages away whose keys lie the other way round."""

    def export_pages(self, pages: Sequence[int]) -> list[PageContent]:
        return [
            [(np.ascontiguousarray(keys[..., ::-1]), values) for keys, values in content]
            for content in super().export_pages(pages)
        ]


class Shifted(WrappingExecutor):
    """Writes pages that it gets to the next place."""

    def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
        super().import_pages([(page + 1) % self.pool.pages for page in pages], contents)


@pytest.mark.parametrize(("first", "last"), [(1, 5), (1, 2), (3, 5), (3, 4), (5, 5)])
@pytest.mark.parametrize("precision", ["fp32", "w8a8"])
def test_a_stage_that_is_right_passes(request: pytest.FixtureRequest, precision: str, first: int, last: int) -> None:
    folder: BlockFolder = request.getfixturevalue(precision)
    stage = REFERENCE.load(folder, first, last, pages=20)
    check(stage, answers(folder, first, last), where="cpu", tolerance=1e-5)
    assert stage.pool.free_pages == 20 and stage.pool.allocate(3) == [0, 1, 2]


@pytest.mark.parametrize(("first", "last"), [(1, 5), (2, 4)])
@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        (lambda rows, past, many: slice(4, None) if rows >= 32 else None, "a prompt of 32:"),
        (lambda rows, past, many: slice(32, None) if rows > 32 else None, "a prompt of 33:"),
        (lambda rows, past, many: slice(64, None) if rows > 64 else None, "a prompt of 65:"),
        (lambda rows, past, many: slice(None) if rows == 1 and not past else None, "a prompt of 1:"),
        (lambda rows, past, many: slice(None) if rows > 1 and past else None, "20 rows behind 40:"),
        (lambda rows, past, many: slice(None) if rows == 1 and past else None, "one row behind 60:"),
        (lambda rows, past, many: slice(-1, None) if many == 2 else None, "prompts of 20 and 3:"),
        (lambda rows, past, many: slice(-1, None) if many == 3 and rows == 9 else None, "one row behind 20, 33 behind"),
    ],
)
def test_each_way_to_be_wrong_is_found_and_named(
    fp32: BlockFolder, first: int, last: int, wrong: Callable[[int, int, int], slice | None], case: str
) -> None:
    stage = Wrong(REFERENCE.load(fp32, first, last, pages=PAGES_NEEDED), wrong)
    with pytest.raises(
        KnownAnswerMismatch, match=f"^webgpu:7 computes wrong numbers .*: {case}.* off by 0.1 "
    ) as caught:
        check(stage, answers(fp32, first, last), where="webgpu:7", tolerance=1e-4)
    assert caught.value.block == f"block_{first}" and stage.pool.free_pages == PAGES_NEEDED


@pytest.mark.parametrize("wrong", [Turned, Shifted])
def test_pages_that_are_wrong_are_found(fp32: BlockFolder, wrong: type[WrappingExecutor]) -> None:
    stage = wrong(REFERENCE.load(fp32, 1, 5, pages=PAGES_NEEDED))
    with pytest.raises(KnownAnswerMismatch, match="one row behind pages that were moved:"):
        check(stage, answers(fp32, 1, 5), where="webgpu:7", tolerance=1e-4)


def test_pages_that_come_back_right_must_leave_right_too(fp32: BlockFolder) -> None:
    class Both(Turned):
        """Takes them as it gives them."""

        def import_pages(self, pages: Sequence[int], contents: Sequence[PageContent]) -> None:
            turned = [[(np.ascontiguousarray(k[..., ::-1]), v) for k, v in content] for content in contents]
            super().import_pages(pages, turned)

    stage = Both(REFERENCE.load(fp32, 1, 5, pages=PAGES_NEEDED))
    with pytest.raises(KnownAnswerMismatch, match="pages as they leave:"):
        check(stage, answers(fp32, 1, 5), where="webgpu:7", tolerance=1e-4)


class Forgetful(CpuProvider):
    """A device whose memory loses a thousandth of what it is given."""

    name = "forgetful"
    device = "forgetful:0"

    def upload(self, session: ort.InferenceSession, array: NDArray[Any]) -> ort.OrtValue:
        array = array.copy()
        array.reshape(-1)[::1000] = 0
        return super().upload(session, array)


class Faithful(Forgetful):
    """One that keeps it."""

    upload = Provider.upload


def test_no_stage_comes_onto_such_a_device(fp32: BlockFolder) -> None:
    assert OnnxExecutors(Faithful()).load(fp32, 1, 5, pages=3).pool.pages == PAGES_NEEDED
    with pytest.raises(KnownAnswerMismatch, match=r"^forgetful:0 computes wrong numbers in block_2: a prompt"):
        OnnxExecutors(Forgetful()).load(fp32, 2, 4, pages=3)


@pytest.mark.driver_on_cpu  # how much the rounding is depends on the driver: an H200 is off by 0.010
@pytest.mark.parametrize("device", [pytest.param("webgpu:0", marks=FLOAT16)])
def test_rounding_that_grows_from_block_to_block_is_no_wrong_kernel(device: str) -> None:
    """The bundled model is served, though all its blocks together are further off than one may be."""
    folder = open_block_folder(BUNDLED_MODEL)
    executors, blocks = OnnxExecutors(open_provider(device)), folder.model.blocks
    stage = executors.load(folder, 1, blocks, pages=PAGES_NEEDED)
    assert stage.details["dtype"] == "float16"
    error = furthest_row(stage, answers(folder, 1, blocks))
    stage.close()
    assert executors.tolerance(folder.manifest) < error < 0.04


@pytest.mark.parametrize("errors", [(math.nan, 0.1), (0.1, math.nan), (0.0, math.nan, 0.2)])
def test_what_is_not_finite_is_the_worst_wherever_it_is(errors: tuple[float, ...]) -> None:
    assert math.isnan(worst(errors))


def test_a_step_that_is_not_finite_is_not_lost_among_the_others(fp32: BlockFolder) -> None:
    right = answers(fp32, 1, 2)
    stage = REFERENCE.load(fp32, 1, 2, pages=PAGES_NEEDED)
    assert furthest_row(stage, right) < 1e-5
    spoiled = replace(right, outputs=(*right.outputs[:-1], right.outputs[-1] * np.float32("nan")))
    assert math.isnan(furthest_row(stage, spoiled))
    stage.close()
