"""Prompt lookup: drafts copy earlier repetitions, and a run whose drafts are wrong pauses them."""

import random
import tracemalloc
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.protocol.constants import MAX_DRAFTS
from blockrelay_worker.sampling import prompt_lookup
from blockrelay_worker.sampling.prompt_lookup import (
    GROUPS,
    INDEXED,
    INDEXED_AT_ONCE,
    LONGEST_PAUSE,
    Drafter,
    KnownTokens,
    right_drafts,
)


def test_what_followed_the_last_tokens_before_is_the_guess() -> None:
    assert Drafter(length=3).draft([1, 2, 3, 4, 5, 9, 2, 3], limit=8) == [4, 5, 9]


def test_the_longest_group_wins_and_of_equal_ones_the_latest() -> None:
    assert Drafter(length=1).draft([7, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2], limit=8) == [30]
    assert Drafter(length=1).draft([1, 2, 30, 5, 1, 2, 40, 5, 9, 1, 2], limit=8) == [40]


def test_a_repetition_that_reaches_the_end_goes_on() -> None:
    assert Drafter(length=6).draft([5, 6, 7, 5, 6, 7, 5, 6], limit=8) == [7, 5, 6, 7, 5, 6]


def test_nothing_is_guessed_without_a_repetition_or_room() -> None:
    assert Drafter().draft([1, 2, 3, 4], limit=8) == []
    assert Drafter().draft([1], limit=8) == []
    assert Drafter().draft([1, 2, 1, 2], limit=0) == []


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8))
def test_it_is_a_function_of_the_tokens_however_they_came(tokens: list[int], most: int) -> None:
    """The incremental index gives what a plain search over all tokens gives."""
    growing = Drafter(length=MAX_DRAFTS)
    for end in range(len(tokens) + 1):
        found = growing.draft(tokens[:end], most)
        assert found == Drafter(length=MAX_DRAFTS).draft(tokens[:end], most) == searched(tokens[:end], most)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 60), st.lists(st.integers(1, 9), min_size=60))
def test_what_the_index_does_not_know_is_searched(tokens: list[int], first: int, news: list[int]) -> None:
    """With an index of very few tokens, after a prompt of any length, however many tokens come at once."""
    few = {"INDEXED": 5, "INDEXED_AT_ONCE": 2, "SEARCHED": 4}
    with mock.patch.dict(vars(prompt_lookup), few):
        drafter = Drafter(length=MAX_DRAFTS, known=KnownTokens(np.array(tokens[:first], np.int32)))
        end = min(first, len(tokens))
        for new in news:
            assert drafter.draft(tokens[:end], 8) == searched(tokens[:end], 8)
            end = min(end + new, len(tokens))


def test_a_long_prompt_is_indexed_in_steps_and_never_whole() -> None:
    dice = random.Random(1)
    tokens = [dice.randrange(50_000) for _ in range(131_072)]
    prompt = np.array(tokens, np.int32)
    tracemalloc.start()
    drafter, before = Drafter(known=KnownTokens(prompt)), 0
    for _ in range(3 * INDEXED // INDEXED_AT_ONCE):
        drafter.draft(tokens, 8)
        size = len(drafter._followers)  # pyright: ignore[reportPrivateUsage]
        assert size - before <= len(GROUPS) * INDEXED_AT_ONCE
        before = size
        tokens.append(dice.randrange(50_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert before <= len(GROUPS) * 2 * INDEXED and peak < 5 << 20
    tokens += tokens[70_000:70_004]
    assert drafter.draft(tokens, 2) == tokens[70_004:70_006], "and yet all of it is found"


def searched(tokens: list[int], most: int) -> list[int]:
    for size in GROUPS:
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[len(tokens) - size :] and len(tokens) > size:
                copy = list(tokens)
                for i in range(most):
                    copy.append(copy[start + size + i])
                return copy[len(tokens) :]
    return []


def test_success_lengthens_drafts_and_failure_ends_them() -> None:
    drafter, repeating = Drafter(), [1, 2] * 20
    lengths: list[int] = []
    for _ in range(5):
        drafts = drafter.draft(repeating, 100)
        lengths.append(len(drafts))
        drafter.verdict(len(drafts), len(drafts))
    assert lengths == [2, 4, 6, 8, MAX_DRAFTS]
    for _ in range(4):
        drafter.verdict(len(drafter.draft(repeating, 100)), 0)
    assert drafter.draft(repeating, 100) == []


def test_a_run_without_success_probes_more_and_more_rarely() -> None:
    drafter, repeating, waits = Drafter(), [1, 2] * 20, list[int]()
    waited = 0
    for _ in range(2000):
        if drafts := drafter.draft(repeating, 100):
            drafter.verdict(len(drafts), 0)
            waits.append(waited)
            waited = 0
        else:
            waited += 1
    assert waits[2:4] == [7, 15] and waits[-1] == LONGEST_PAUSE - 1


def test_drafts_are_right_up_to_the_first_that_is_not() -> None:
    assert right_drafts([4, 5, 6], [4, 5, 6, 7]) == 3
    assert right_drafts([4, 5, 6], [4, 9]) == 1
    assert right_drafts([4, 5, 6], [4]) == 0, "the last one was sampled, whatever it is: it has no row yet"
    assert right_drafts([], [4]) == 0
