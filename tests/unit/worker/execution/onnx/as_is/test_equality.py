"""ONNX blocks that are run as they are give what the whole exported model gives in one session."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.onnx.as_is.loading import AsIsExecutors
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.offline.onnx_blocks.splitting.split import run as split
from tests.support.models.genai_decoder import genai_decoder
from tests.support.models.greedy import in_one_batch, next_tokens, of_sessions
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.run_onnx import Running, blocks, whole
from tests.support.models.whole_decoders import SMALL, dynamo_decoder, optimum_decoder, saved

pytestmark = pytest.mark.onnx_blocks

MODELS: dict[str, Callable[[], ModelProto]] = {
    "optimum": lambda: optimum_decoder(float32=True),
    "optimum in float16": optimum_decoder,
    "dynamo": dynamo_decoder,
    "genai": genai_decoder,
    "genai in int4": lambda: genai_decoder(int4=True),
}
PROMPTS, TOKENS = 10, 64


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BlockFolder]:
    """The file of the whole, and its blocks as services open them."""
    folder = tmp_path_factory.mktemp("model")
    path, out = saved(MODELS[request.param](), folder / "whole" / "model.onnx", external=True), folder / "blocks"
    assert split([str(path), str(out)]) == 0
    return path, opened(out, folder / "cache")


@pytest.fixture
def stage(model: tuple[Path, BlockFolder]) -> Iterator[AsIsStage]:
    folder = model[1]
    made, _ = AsIsExecutors(CpuProvider()).loaded(folder, 1, folder.model.blocks, pages=80)
    yield made
    made.close()


def prompts() -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(0, SMALL.vocabulary, size).tolist() for size in range(3, 3 + 3 * PROMPTS, 3)]


def test_greedy_tokens_of_ten_prompts_in_one_batch(model: tuple[Path, BlockFolder], stage: AsIsStage) -> None:
    """All at once, each with its own length, on pages that lie anywhere."""
    texts, first = prompts(), np.random.default_rng(3).permutation(stage.pool.pages)
    pages = [tuple(int(page) for page in first[8 * n : 8 * n + 8]) for n in range(PROMPTS)]
    found = in_one_batch(stage, texts, pages, TOKENS)
    for text, tokens in zip(texts, found, strict=True):
        oracle = of_sessions(oracle_of(model), text)
        assert tokens == [next(oracle)[0] for _ in range(TOKENS)]


def oracle_of(model: tuple[Path, BlockFolder]) -> Running:
    """The whole in one session. In float16 the sessions of its blocks, which round where they end, as the whole does
    not: ONNX Runtime's CPU provider computes in float32 and rounds at the border of a graph."""
    path, folder = model
    narrow = folder.manifest.precision == "fp16"
    assert folder.onnx_root is not None
    return blocks(folder.onnx_root, optimised=True) if narrow else whole(path, optimised=True)


def test_behind_what_the_whole_says_the_next_token_is_the_same_where_it_is_clear(
    model: tuple[Path, BlockFolder], stage: AsIsStage
) -> None:
    """In float16 too: wherever the best logit is 0.1 above the second."""
    clear = 0
    for text in prompts():
        oracle = of_sessions(whole(model[0], optimised=True), text)
        given, past = text, 0
        for _ in range(TOKENS):
            token, margin = next(oracle)
            (found,) = next_tokens(stage, [(given, past, tuple(range(8)))])
            if margin > 0.1:
                clear += 1
                assert found == token
            given, past = [token], past + len(given)
    assert clear > PROMPTS * TOKENS // 2


def test_a_prompt_in_chunks_is_the_prompt(stage: AsIsStage) -> None:
    text, at_once, in_parts = prompts()[-1], tuple(range(4)), tuple(range(4, 8))
    (expected,) = next_tokens(stage, [(text, 0, at_once)])
    found = [
        next_tokens(stage, [(text[begin:end], begin, in_parts)])
        for begin, end in ((0, 5), (5, 6), (6, 21), (21, len(text)))
    ]
    assert found[-1] == [expected]


def test_pages_go_on_elsewhere(model: tuple[Path, BlockFolder], stage: AsIsStage) -> None:
    """What leaves is what another stage goes on from, bit by bit."""
    text, folder = prompts()[6], model[1]
    (token,) = next_tokens(stage, [(text, 0, (5, 1))])
    other, _ = AsIsExecutors(CpuProvider()).loaded(folder, 1, folder.model.blocks, pages=20)
    other.import_pages([3, 9], stage.export_pages([5, 1]))

    def behind(one: AsIsStage, pages: tuple[int, ...]) -> bytes:
        step = Segment(rows=1, first_position=len(text), pages=pages)
        logits = one.run(Batch(segments=[step], tokens=np.array([token], np.int32), wanted=[0])).logits
        assert logits is not None
        return logits.tobytes()

    assert behind(other, (3, 9)) == behind(stage, (5, 1))
    other.close()
