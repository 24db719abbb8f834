"""Bias, penalties and forbidden tokens change a row of logits as a few lines of NumPy do to the whole of it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.sampling.logit_changes import TokenCounts, changes_of
from blockrelay_worker.sampling.row_sampler import sampler_of
from blockrelay_worker.sampling.sampler import Draw, sample

VOCABULARY = 40
ENDS = (0, 7)


def oracle(
    row: NDArray[np.float32], params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> NDArray[np.float64]:
    """The whole row, changed token by token."""
    logits, times = row.astype(np.float64), Counter(generated)
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in {*prompt, *generated}:
        above = logits[token] > 0
        logits[token] = (
            logits[token] / params.repetition_penalty if above else logits[token] * params.repetition_penalty
        )
    for token, count in times.items():
        logits[token] -= params.frequency_penalty * count
        logits[token] -= params.presence_penalty
    if len(generated) < params.min_tokens:
        logits[list(params.end_ids(ENDS))] = -np.inf
    for word in params.bad_words:
        if len(word) - 1 <= len(generated) and tuple(generated[len(generated) - len(word) + 1 :]) == word[:-1]:
            logits[word[-1]] = -np.inf
    return logits


tokens = st.integers(0, VOCABULARY - 1)
penalties = st.sampled_from([-2.0, -0.3, 0.0, 0.1, 1.7])
fields = st.fixed_dictionaries(
    {
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.25, 100.0]), max_size=5).map(
            lambda each: tuple(each.items())
        ),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "frequency_penalty": penalties,
        "presence_penalty": penalties,
        "min_tokens": st.integers(0, 12),
        "bad_words": st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
        "stop_token_ids": st.just((9,)),
        "temperature": st.sampled_from([0.0, 0.7]),
        "top_p": st.sampled_from([0.8, 1.0]),
    }
)


@settings(max_examples=200, deadline=None)
@given(
    fields=fields, prompt=st.lists(tokens, min_size=1, max_size=8), generated=st.lists(tokens, max_size=12),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_a_changed_row_is_that_of_the_oracle_and_both_samplers_draw_from_it(
    fields: dict[str, Any], prompt: list[int], generated: list[int], seed: int
) -> None:
    params = SamplingParams(max_tokens=20, **fields)
    row = (4 * np.random.default_rng(seed).normal(size=VOCABULARY)).astype(np.float32)
    counts = TokenCounts([*prompt, *generated], len(prompt))
    ids, values = changes_of(row, params, counts, [*prompt, *generated], params.end_ids(ENDS))
    expected, found = oracle(row, params, prompt, generated), row.astype(np.float64)
    found[ids] = values
    assert found.tobytes() == expected.tobytes()
    draw = Draw(row, params, seed, len(prompt) + len(generated), (ids, values))
    by_definition = sample(draw)
    assert sampler_of(load_kernels(1))([draw]) == [by_definition]
    if by_definition.token >= 0:
        assert expected[by_definition.token] > -np.inf
    else:
        assert expected.max() == -np.inf


@given(prompt=st.lists(tokens, max_size=10), known=st.lists(tokens, max_size=200), drafts=st.lists(tokens, max_size=8))
def test_counts_go_on_and_back(prompt: list[int], known: list[int], drafts: list[int]) -> None:
    counts = TokenCounts(prompt, len(prompt))
    counts.add(known)
    for _ in range(2):
        counts.add(drafts)
        counts.take_back(drafts)
    times = Counter(known)
    assert counts.ids.tolist() == list(dict.fromkeys([*prompt, *known]))
    assert counts.times.tolist() == [times[token] for token in counts.ids.tolist()]
    assert counts.generated == len(known)


@pytest.mark.parametrize(
    ("params", "changes"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0.3, top_p=0.5, logprobs=2), False),
        (SamplingParams(logit_bias=((3, 1.0),)), True),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(presence_penalty=-0.1), True),
        (SamplingParams(frequency_penalty=0.1), True),
        (SamplingParams(min_tokens=1), True),
        (SamplingParams(bad_words=((1, 2),)), True),
    ],
)
def test_what_changes_nothing_costs_nothing(params: SamplingParams, changes: bool) -> None:
    assert params.changes_logits is changes
