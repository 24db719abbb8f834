"""Scores of a prompt are those of NumPy, one row at a time, in any chunks and on every instruction set."""

import numpy as np
import pytest
from numpy.typing import NDArray

from blockrelay.errors import WireError
from blockrelay.protocol.encoding.prompt_logprobs import PromptLogprobs
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.policy import SCORED_ROWS
from blockrelay_worker.sampling.prompt_scores import PromptScores
from blockrelay_worker.sampling.row_sampler import Sampler, sampler_of
from blockrelay_worker.sampling.sampler import log_probabilities
from tests.support.worker.kernel_variants import NATIVE

BY_NUMPY = sampler_of(load_kernels(1, isa="reference"))
VOCABULARY = 300
PROMPT = np.random.default_rng(3).integers(0, VOCABULARY, 20).astype(np.int32)


def _rows() -> NDArray[np.float32]:
    """Logits of all tokens of PROMPT; every third row has many ties."""
    rows = (4 * np.random.default_rng(4).standard_normal((PROMPT.size, VOCABULARY))).astype(np.float32)
    rows[::3] = np.round(rows[::3])
    return rows


def _scored(sampler: Sampler, *, listed: int = 5, chunk: int = PROMPT.size, again: int = 0) -> str:
    """What is stored about PROMPT; `again`: rows of each chunk that an earlier step had too."""
    scores, rows = PromptScores(PROMPT, listed, vocab_size=VOCABULARY), _rows()
    for position in range(0, PROMPT.size, chunk):
        begin = max(0, position - again)
        part = rows[begin : position + chunk]
        wanted = scores.wanted(begin, len(part))
        scores.add(part[wanted.start : wanted.stop], sampler)
    return scores.encode()


def test_scores_are_the_log_softmax_of_each_row() -> None:
    found = PromptLogprobs.decode(_scored(BY_NUMPY), tokens=PROMPT.size)
    for at, (row, token) in enumerate(zip(_rows()[:-1], PROMPT[1:].tolist(), strict=True)):
        logprobs = log_probabilities(row)
        order = np.argsort(-row, kind="stable")
        assert found.logprobs[at] == logprobs[token]
        assert found.ranks[at] == 1 + order.tolist().index(token)
        assert found.top_ids[at].tolist() == order[:5].tolist()
        assert found.top_logprobs[at].tolist() == logprobs[order[:5]].tolist()


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
def test_chunks_change_no_bit(chunk: int) -> None:
    whole = _scored(BY_NUMPY)
    assert _scored(BY_NUMPY, chunk=chunk) == whole
    assert _scored(BY_NUMPY, chunk=chunk, again=5) == whole, "rows that were computed again are not scored again"


@pytest.mark.skipif(not NATIVE, reason="no kernels were compiled here")
@pytest.mark.parametrize("listed", [0, 1, 20])
def test_every_instruction_set_gives_the_same_bits(listed: int) -> None:
    expected = _scored(BY_NUMPY, listed=listed)
    for name, kernels in NATIVE.items():
        assert _scored(sampler_of(kernels), listed=listed) == expected, name


def test_a_small_vocabulary_lists_no_more_than_it_has() -> None:
    scores = PromptScores(np.array([1, 2], np.int32), 20, vocab_size=3)
    scores.add(np.array([[0.5, 0.25, 1.0]], np.float32), BY_NUMPY)
    found = PromptLogprobs.decode(scores.encode(), tokens=2)
    assert found.top_ids.tolist() == [[2, 0, 1]] and found.ranks.tolist() == [1]


def test_a_single_token_has_no_score() -> None:
    scores = PromptScores(np.array([7], np.int32), 3, vocab_size=9)
    assert scores.complete and not scores.wanted(0, 1)
    assert PromptLogprobs.decode(scores.encode(), tokens=1).logprobs.size == 0


def test_the_last_row_of_the_prompt_scores_nothing() -> None:
    scores = PromptScores(PROMPT, 0, vocab_size=VOCABULARY)
    assert scores.wanted(0, SCORED_ROWS) == range(PROMPT.size - 1)
    assert not scores.wanted(PROMPT.size - 1, 4)


def test_what_is_no_encoding_is_refused() -> None:
    good = _scored(BY_NUMPY)
    for bad in (None, "", 7, "AAAA", "no base64!", good[:-8], good + "AAAA"):
        with pytest.raises(WireError, match="log probabilities"):
            PromptLogprobs.decode(bad, tokens=PROMPT.size)
    with pytest.raises(WireError, match="for a prompt of 19"):
        PromptLogprobs.decode(good, tokens=19)
