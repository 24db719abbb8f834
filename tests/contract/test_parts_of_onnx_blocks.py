"""ONNX blocks that others made give the same in any number of stages: consecutive blocks each, tensors handed on by
name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.onnx.as_is.loading import AsIsExecutors
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage
from blockrelay_worker.execution.onnx.known_answers import row_error
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.offline.onnx_blocks.splitting.split import run as split
from tests.support.models.cut_onnx_blocks import Row, cut, run
from tests.support.models.genai_decoder import genai_decoder
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.models.whole_decoders import dynamo_decoder, optimum_decoder, saved

#: Four layers and the head.
SHAPE = ReferenceModel(layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=128, vocabulary=256)
BLOCKS = SHAPE.layers + 1
CUTS = ((5,), (2, 5), (1, 2, 3, 4, 5), (4, 5))
MODELS: dict[str, Callable[[], ModelProto]] = {
    "optimum": lambda: optimum_decoder(SHAPE, float32=True),
    "dynamo": lambda: dynamo_decoder(SHAPE),
    "genai": lambda: genai_decoder(SHAPE),
}


@dataclass(frozen=True, slots=True)
class Served:
    folder: BlockFolder
    tolerance: float


@pytest.fixture(scope="module", params=["float16", *MODELS])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    root = tmp_path_factory.mktemp("parts")
    if request.param == "float16":
        return Served(opened(write_reference_blocks(root / "blocks", SHAPE), root / "cache"), 2e-2)
    path = saved(MODELS[request.param](), root / "whole" / "model.onnx", external=True)
    assert split([str(path), str(root / "blocks")]) == 0
    return Served(opened(root / "blocks", root / "cache"), 1e-5)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    root = tmp_path_factory.mktemp("narrow")
    return opened(write_reference_blocks(root / "blocks", SHAPE), root / "cache")


def texts() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(0, SHAPE.vocabulary, size).tolist() for size in (5, 5, 20, 3, 5)]


def pages_of(number: int) -> range:
    return range(4 * number, 4 * number + 4)


def told(stages: Sequence[AsIsStage]) -> list[NDArray[np.float32]]:
    """Logits of five requests: prompts in one batch, one of them in chunks beside the decode steps of others, and then
    steps of all five."""
    found: list[NDArray[np.float32]] = []
    prompts, done = texts(), [0] * 5
    for parts in ([5, 5, 7, 3, 5], [1, 1, 13, 1, 1], [1, 0, 1, 2, 1], [1, 1, 1, 1, 1]):
        rows: list[Row] = []
        for number, count in enumerate(parts):
            if count:
                text = [*prompts[number], *range(10, 20)]
                rows.append((text[done[number] : done[number] + count], done[number], pages_of(number)))
                done[number] += count
        found.append(run(stages, rows, all_wanted=True))
    return found


def close(stages: Sequence[AsIsStage]) -> None:
    for stage in stages:
        stage.close()


def test_any_cut_gives_the_logits_of_one_stage(served: Served) -> None:
    executors, known = AsIsExecutors(CpuProvider()), list[NDArray[np.float32]]()
    for ends in CUTS:
        stages = cut(executors, served.folder, ends)
        assert sum(stage.layout.layers for stage in stages) == SHAPE.layers
        found = told(stages)
        known = known or found
        for one, right in zip(found, known, strict=True):
            assert row_error(one, right) <= served.tolerance
        close(stages)
