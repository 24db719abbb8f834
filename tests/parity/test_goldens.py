"""The executor says what transformers says: greedy tokens of every family. The goldens are committed: no torch here."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.model import Precision
from blockrelay_converter.convert import convert
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.loading import load_stage
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels import load_kernels
from tests.support.models.parity_cases import CASES, NEW_TOKENS, Case, checkpoint_sha256, goldens

ODD_CHUNK = 13
"""Prompt tokens per run: no multiple of a page."""

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


class Greedy:
    """One request on a whole model in one stage."""

    def __init__(self, folder: BlockFolder) -> None:
        blocks = folder.model.blocks
        self._stage = load_stage(folder, 1, blocks, pages=64, threads=1, kernels=load_kernels(1))
        self._pages: list[int] = []
        self._length = 0

    def feed(self, tokens: list[int]) -> NDArray[np.float32]:
        """Run `tokens` next; the logits [vocab] after the last of them."""
        end = self._length + len(tokens)
        self._pages += self._stage.pool.allocate(pages_for(end) - len(self._pages))
        segment = Segment(rows=len(tokens), first_position=self._length, pages=self._pages)
        batch = Batch(segments=[segment], tokens=np.array(tokens, np.int32), wanted=[len(tokens) - 1])
        output = self._stage.run(batch)
        assert output.logits is not None
        assert output.not_finite == ()
        self._length = end
        return output.logits[0].copy()

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """The `count` greedy tokens after `prompt`."""
        chunks = [prompt[start : start + ODD_CHUNK] for start in range(0, len(prompt), ODD_CHUNK)]
        tokens = [int([self.feed(chunk) for chunk in chunks][-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.feed(tokens[-1:]).argmax()))
        return tokens


@pytest.fixture(scope="module")
def in_float32(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], BlockFolder]:
    """The float32 folder of a case, converted once; its checkpoint is `checkpoint` beside it."""
    made: dict[str, BlockFolder] = {}

    def once(case: Case) -> BlockFolder:
        if case.name not in made:
            made[case.name] = converted(case, tmp_path_factory.mktemp(case.name), "fp32")
        return made[case.name]

    return once


def converted(case: Case, folder: Path, precision: Precision) -> BlockFolder:
    out = folder / precision
    convert(case.write(folder / "checkpoint"), out, precision=precision, report=lambda *_: None)
    return open_block_folder(out)


@every_case
def test_fp32_generates_exactly_the_greedy_tokens_of_transformers(
    case: Case, in_float32: Callable[[Case], BlockFolder]
) -> None:
    golden = goldens()[case.name]
    folder = in_float32(case)
    assert checkpoint_sha256(folder.root.parent / "checkpoint") == golden["sha256"], "the recipe changed"
    assert case.prompt() == golden["prompt"]

    tokens = Greedy(folder).generate(golden["prompt"], NEW_TOKENS)

    assert tokens == golden["tokens"]


def test_the_command_line_generates_the_same_tokens(in_float32: Callable[[Case], BlockFolder]) -> None:
    case = CASES[0]
    golden = goldens()[case.name]
    folder = in_float32(case).root
    command = [sys.executable, "-m", "blockrelay_worker.offline.generate", "--model", str(folder)]
    command += ["--ids", ",".join(map(str, golden["prompt"])), "--max-tokens", str(NEW_TOKENS)]
    command += ["--temperature", "0", "--ignore-eos", "--json"]

    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert json.loads(done.stdout)["tokens"] == golden["tokens"]


@every_case
def test_w8a8_computes_nearly_the_same_logits(
    case: Case, in_float32: Callable[[Case], BlockFolder], tmp_path: Path
) -> None:
    prompt = case.prompt()
    quantised = Greedy(converted(case, tmp_path, "w8a8")).feed(prompt)
    reference = Greedy(in_float32(case)).feed(prompt)

    assert np.corrcoef(quantised, reference)[0, 1] > 0.99


def test_goldens_are_those_of_the_cases_and_have_clear_margins() -> None:
    assert [case.name for case in CASES] == list(goldens())
    for golden in goldens().values():
        assert len(golden["tokens"]) == NEW_TOKENS
        assert golden["smallest_margin"] >= 0.01, "float32 rounding could decide this argmax"
