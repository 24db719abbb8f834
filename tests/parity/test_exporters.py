"""What real exporters write is split, checked, served as it is, and imported where it is a Llama.

`make parity-exporters` exports the models first, each exporter in an environment of its own (tests/parity/exporters).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay_converter.onnx_source.__main__ import run as run_import
from blockrelay_worker.execution.onnx.as_is.loading import AsIsExecutors
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.offline.onnx_blocks.check import run as run_check
from blockrelay_worker.offline.onnx_blocks.splitting.split import run as run_split
from blockrelay_worker.offline.pipeline import Pipeline
from tests.support.models.cut_onnx_blocks import Row, cut
from tests.support.models.cut_onnx_blocks import run as run_stages
from tests.support.models.exports import CASES, LAYERS, VOCABULARY, Export
from tests.support.models.greedy import in_one_batch, next_tokens, of_sessions
from tests.support.models.imported import imported
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.run_onnx import Running, blocks, requests, whole

pytestmark = pytest.mark.exporters

TOKENS = 32
#: Lengths of the prompts.
PROMPTS = (3, 10, 21)
#: Tokens count where the whole's best logit is so much above the next one, wherever something is rounded.
MARGIN = 0.1


@dataclass(frozen=True, slots=True)
class Split:
    """An export, its blocks, and these as services open them."""

    export: Export
    blocks: Path
    folder: BlockFolder


def ids(cases: Sequence[Export]) -> list[str]:
    return [f"{case.exporter}-{case.name}" for case in cases]


@pytest.fixture(scope="module", params=CASES, ids=ids(CASES))
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Split:
    export: Export = request.param
    assert export.file.is_file(), f"make parity-exporters writes {export.file}"
    folder = tmp_path_factory.mktemp("split")
    assert run_split([str(export.file), str(folder / "blocks")]) == 0
    return Split(export, folder / "blocks", opened(folder / "blocks", folder / "cache"))


def only(wanted: Callable[[Export], bool]) -> pytest.MarkDecorator:
    cases = [case for case in CASES if wanted(case)]
    return pytest.mark.parametrize("split", cases, indirect=True, ids=ids(cases))


@pytest.fixture
def stage(split: Split) -> Iterator[AsIsStage]:
    made, _ = AsIsExecutors(CpuProvider()).loaded(split.folder, 1, split.folder.model.blocks, pages=40)
    yield made
    made.close()


def prompts() -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(3, VOCABULARY, size).tolist() for size in PROMPTS]


def whole_of(split: Split) -> Running:
    """In one session, as its exporter's users run it."""
    return whole(split.export.file, optimised=True)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(("sequence", "past"), [(10, 0), (1, 7)])
def test_the_check_passes_every_block(
    split: Split, batch: int, sequence: int, past: int, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--batch", str(batch), "--sequence", str(sequence), "--past", str(past)]
    assert run_check(["--device", "cpu", *sizes, "--", str(split.blocks)]) == 0
    _, *checked = capsys.readouterr().out.splitlines()
    assert len(checked) == LAYERS + 1


@only(lambda export: export.kind != "fp16")
def test_blocks_compute_the_bits_of_the_whole(split: Split) -> None:
    """Without graph optimisation, which would end at borders."""
    one, several = whole(split.export.file), blocks(split.blocks)
    for request in requests((7, 1, 1), batch=2, vocabulary=VOCABULARY):
        expected, found = one.step(request), several.step(request)
        assert expected["logits"].tobytes() == found["logits"].tobytes()


def test_served_as_it_is_the_tokens_are_those_of_the_whole(split: Split, stage: AsIsStage) -> None:
    """Three prompts in one batch. In float16 the oracle are the blocks, which round where they end, as the whole does
    not: ONNX Runtime's CPU provider computes in float32 and rounds at the border of a graph."""
    pages = [tuple(range(10 * number, 10 * number + 10)) for number in range(len(PROMPTS))]
    found = in_one_batch(stage, prompts(), pages, TOKENS)
    for text, tokens in zip(prompts(), found, strict=True):
        narrow = split.export.kind == "fp16"
        oracle = blocks(split.blocks, optimised=True) if narrow else whole_of(split)
        assert tokens == [token for token, _ in islice(of_sessions(oracle, text), TOKENS)]
        assert len(set(tokens)) > 3, "a model that says one thing proves nothing"


def test_served_as_it_is_behind_what_the_whole_says_clear_tokens_are_equal(split: Split, stage: AsIsStage) -> None:
    """In float16 too."""
    clear = 0
    for text in prompts():
        given, past = text, 0
        for token, margin in islice(of_sessions(whole_of(split), text), TOKENS):
            (found,) = next_tokens(stage, [(given, past, tuple(range(10)))])
            if margin > MARGIN:
                clear += 1
                assert found == token
            given, past = [token], past + len(given)
    assert clear > len(PROMPTS) * TOKENS // 2


@pytest.mark.parametrize("each", [True, False], ids=["a stage for each block", "two stages"])
def test_in_stages_the_logits_are_those_of_one(split: Split, stage: AsIsStage, each: bool) -> None:
    """Of prompts of different lengths in one batch, and of steps behind them; what travels is what this exporter calls
    it."""
    ends, pages = range(1, LAYERS + 2) if each else (2, LAYERS + 1), [range(10 * n, 10 * n + 10) for n in range(3)]
    stages = cut(AsIsExecutors(CpuProvider()), split.folder, ends, pages=40)
    rows: list[Row] = [(text, 0, own) for text, own in zip(prompts(), pages, strict=True)]
    for _ in range(3):
        found, right = (run_stages(one, rows, all_wanted=True) for one in (stages, [stage]))
        tolerance = 2e-2 if split.export.kind == "fp16" else 1e-5
        assert (np.linalg.norm(found - right, axis=1) <= tolerance * np.linalg.norm(right, axis=1)).all()
        rows = [([7], past + len(text), own) for text, past, own in rows]
    for one in stages:
        one.close()


@only(lambda export: export.is_llama)
def test_imported_behind_what_the_whole_says_clear_tokens_are_equal(split: Split, tmp_path: Path) -> None:
    folder = imported(split.blocks, tmp_path / "out").folder
    clear = 0
    for text in prompts():
        pipeline, given, past = Pipeline(folder, stages=1, threads=1, tokens=len(text) + TOKENS), text, 0
        for token, margin in islice(of_sessions(whole_of(split), text), TOKENS):
            logits = pipeline.run(given, past)[0]
            if margin > MARGIN:
                clear += 1
                assert logits.argmax() == token
            given, past = [token], past + len(given)
    assert clear > len(PROMPTS) * TOKENS // 2


#: What is said of a model that is no Llama.
REFUSED = {"gpt2": f"block_1.onnx: has no RMS norms; a Llama of {LAYERS} layers has {2 * LAYERS + 1}"}


@only(lambda export: not export.is_llama)
def test_what_is_no_llama_is_not_imported(split: Split, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_import([str(split.blocks), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"blockrelay: {REFUSED[split.export.model]}"
    assert not list(tmp_path.iterdir())
