"""ONNX blocks that others made say which of them made a row NaN, beside masks of minus infinity."""

from collections.abc import Iterator

import numpy as np
import pytest

from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.onnx.as_is.loading import AsIsExecutors
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage
from blockrelay_worker.execution.onnx.as_is.warm_blocks import ALL, WarmLimits
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.kv.finite_pages import finite_tokens
from tests.support.models.altered_blocks import spoiled_for
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks

pytestmark = pytest.mark.onnx_blocks

MARK = 7


@pytest.fixture(scope="module", params=[ALL, WarmLimits(sessions=1)], ids=["warm", "one by one"])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsIsStage]:
    """Four layers and the head, of which block 3 is wrong for a token."""
    root = tmp_path_factory.mktemp("spoiled")
    whole = write_reference_blocks(root / "whole", ReferenceModel(layers=4))
    blocks = spoiled_for(whole, root / "blocks", MARK)
    folder = opened(blocks, root / "cache")
    made, _ = AsIsExecutors(CpuProvider(), warm=request.param).loaded(folder, 1, folder.model.blocks, pages=40)
    yield made
    made.close()


def batch(*tokens: int, past: int = 0, wanted: bool = True) -> Batch:
    return Batch(
        segments=[Segment(rows=len(tokens), first_position=past, pages=[4, 1, 3])],
        tokens=np.array(tokens, np.int32),
        wanted=[len(tokens) - 1] if wanted else [],
    )


def test_the_block_is_named_with_the_seconds_of_those_before_it(stage: AsIsStage) -> None:
    assert stage.run(batch(3, MARK, 9)).not_finite == (0,)
    fault = stage.first_not_finite(batch(3, MARK, 9))
    assert fault is not None and fault.block == "block_3"
    assert list(fault.seconds) == ["block_1", "block_2", "block_3"] and all(fault.seconds.values())
    assert stage.first_not_finite(batch(3, 5, 9)) is None


def test_rows_that_nobody_wants_are_looked_at(stage: AsIsStage) -> None:
    """A part of a prompt shows nothing; the pages behind it do, and the block is named from there."""
    tokens = list(range(40, 56))
    assert stage.run(batch(*tokens, wanted=False)).not_finite == ()
    assert stage.run(batch(3, MARK, 9, past=16, wanted=False)).not_finite == ()
    assert finite_tokens(stage, [4, 1, 3], 19) == finite_tokens(stage, [4, 1, 3], 16) == 16
    assert stage.run(batch(5, past=19)).not_finite == (0,)
    fault = stage.first_not_finite(batch(3, MARK, 9, past=16, wanted=False))
    assert fault is not None and fault.block == "block_3"
    stage.run(batch(3, 5, 9, past=16, wanted=False))
    assert finite_tokens(stage, [4, 1, 3], 19) == 19
