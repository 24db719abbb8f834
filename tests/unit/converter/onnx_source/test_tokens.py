"""The 33 blocks and what was imported of them predict the same tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay_worker.offline.pipeline import Pipeline
from tests.support.models.imported import imported
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.models.run_onnx import blocks

pytestmark = pytest.mark.onnx_blocks

PROMPTS, PROMPT_TOKENS, STEPS = 10, 8, 64
#: Tokens count where the best logit is so much above the next one: below, float16 may decide either way.
MARGIN = 0.1


def test_64_greedy_tokens_of_ten_prompts(tmp_path: Path) -> None:
    """Both go along the tokens that the original blocks choose, so that every step is compared."""
    model = ReferenceModel()
    originals = write_reference_blocks(tmp_path / "blocks", model)
    found = imported(originals, tmp_path / "out")
    prompts = np.random.default_rng(15).integers(0, model.vocabulary, (PROMPTS, PROMPT_TOKENS))
    chosen, margins = greedy(originals, prompts)
    pipeline = Pipeline(found.folder, stages=1, threads=1, tokens=PROMPT_TOKENS + STEPS)
    same = np.zeros((PROMPTS, STEPS), bool)
    for row, prompt in enumerate(prompts):
        tokens, first = list(prompt), 0
        for step in range(STEPS):
            logits = pipeline.run(tokens[first:], first)[0]
            same[row, step] = logits.argmax() == chosen[row, step]
            first = len(tokens)
            tokens.append(int(chosen[row, step]))
    clear = margins > MARGIN
    assert clear.sum() > PROMPTS * STEPS // 2
    assert same[clear].all(), f"{(~same[clear]).sum()} of {clear.sum()} tokens differ"


def greedy(folder: Path, prompts: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """[prompts, steps]: the tokens with the best logits of the original blocks, and how much better than the next."""
    running = blocks(folder, optimised=True)
    new, length = prompts, 0
    tokens: list[NDArray[Any]] = []
    margins: list[NDArray[Any]] = []
    for _ in range(STEPS):
        total = length + new.shape[1]
        request = {
            "input_ids": new,
            "attention_mask": np.ones((len(new), total), np.int64),
            "position_ids": np.tile(np.arange(length, total), (len(new), 1)),
        }
        logits = running.step(request)["logits"][:, -1].astype(np.float32)
        best = np.sort(logits, axis=-1)
        margins.append(best[:, -1] - best[:, -2])
        tokens.append(logits.argmax(axis=-1))
        new, length = tokens[-1][:, None], total
    return np.stack(tokens, axis=1), np.stack(margins, axis=1)
