"""The number of prompt rows beside decode rows, and of drafts, from measured step costs."""

from hypothesis import given
from hypothesis import strategies as st

from blockrelay_worker.scheduling.step_cost import (
    FIRST_CHUNK,
    LEAST_CHUNK,
    MEMORY_STEPS,
    SETTLING_STEPS,
    SIZES,
    StepCost,
    max_drafts,
    observed,
    patience_s,
    prompt_tokens_alone,
    prompt_tokens_beside,
)


def test_rows_fill_the_time_that_decoding_leaves() -> None:
    assert prompt_tokens_beside(StepCost(decode_s=0.05, prompt_token_s=0.001), 0.25, 512) == 192


def test_cheap_rows_are_bounded_by_the_batch_alone() -> None:
    assert prompt_tokens_beside(StepCost(decode_s=0.001, prompt_token_s=0.0001), 0.25, 512) == 512


def test_a_prompt_always_gets_on() -> None:
    assert prompt_tokens_beside(StepCost(decode_s=0.9, prompt_token_s=0.01), 0.25, 512) == LEAST_CHUNK
    assert prompt_tokens_beside(StepCost(decode_s=0.9, prompt_token_s=0.01), 0.25, 8) == 8


def test_before_anything_was_measured_a_small_chunk_goes() -> None:
    assert prompt_tokens_beside(StepCost(), 0.25, 512) == FIRST_CHUNK


def test_what_a_step_says_about_its_rows() -> None:
    cost = observed(StepCost(), decode_tokens=0, prompt_tokens=100, seconds=0.2)
    assert cost == StepCost(None, 0.002, prompt_steps=1)
    cost = observed(cost, decode_tokens=4, prompt_tokens=0, seconds=0.1)
    assert cost == StepCost(0.1, 0.002, {4: 0.1}, steps=1, prompt_steps=1)
    assert observed(cost, decode_tokens=4, prompt_tokens=8, seconds=9.0) == cost, "too few rows to tell"
    mixed = observed(cost, decode_tokens=4, prompt_tokens=100, seconds=0.3)
    assert mixed.prompt_token_s is not None and abs(mixed.prompt_token_s - 0.002) < 1e-9 and mixed.decode_s == 0.1


def test_a_chunk_alone_is_small_until_its_cost_is_known_and_then_as_large_as_it_may_take_long() -> None:
    assert prompt_tokens_alone(StepCost(decode_s=0.1), 5.0, 512) == FIRST_CHUNK
    assert prompt_tokens_alone(StepCost(decode_s=0.1, prompt_token_s=0.002), 5.0, 512) == 512
    assert prompt_tokens_alone(StepCost(decode_s=9.0, prompt_token_s=0.05), 5.0, 512) == 96, (
        "no decode row is among them"
    )
    assert prompt_tokens_alone(StepCost(prompt_token_s=1.0), 5.0, 512) == LEAST_CHUNK


def test_first_steps_that_also_read_weights_from_the_disk_do_not_make_chunks_small() -> None:
    cost = observed(StepCost(), decode_tokens=0, prompt_tokens=64, seconds=6.4)
    assert prompt_tokens_alone(cost, 5.0, 512) == 48
    cost = observed(cost, decode_tokens=0, prompt_tokens=48, seconds=0.1)
    assert prompt_tokens_alone(cost, 5.0, 512) == 512


def test_later_measurements_count_in_part() -> None:
    cost = StepCost()
    for _ in range(SETTLING_STEPS + 1):
        cost = observed(cost, decode_tokens=0, prompt_tokens=100, seconds=1.0)
    once = observed(cost, decode_tokens=0, prompt_tokens=100, seconds=0.1)
    assert once.prompt_token_s is not None and 0.005 < once.prompt_token_s < 0.01


def test_a_step_may_last_as_long_as_its_rows_should_take() -> None:
    quick = StepCost(prompt_token_s=0.001, by_tokens={1: 0.01, 8: 0.02})
    assert patience_s(quick, decode_tokens=8, prompt_tokens=512, least_s=30) == 30
    slow = StepCost(prompt_token_s=0.5, by_tokens={1: 4.0})
    assert patience_s(slow, decode_tokens=0, prompt_tokens=32, least_s=30) == 64
    assert patience_s(slow, decode_tokens=4, prompt_tokens=0, least_s=30) == 64, "at most as many times longer"
    assert patience_s(slow, decode_tokens=4, prompt_tokens=32, least_s=30) == 128


def test_what_nothing_was_measured_of_may_last_longer_the_more_it_is() -> None:
    assert patience_s(StepCost(), decode_tokens=0, prompt_tokens=FIRST_CHUNK, least_s=30) == 30
    assert patience_s(StepCost(), decode_tokens=1, prompt_tokens=512, least_s=30) == 270
    assert patience_s(StepCost(), decode_tokens=64, prompt_tokens=0, least_s=30) == 30


@given(st.floats(1e-4, 1.0), st.floats(1e-6, 1e-2), st.floats(0.01, 1.0))
def test_the_bound_leads_to_the_target(decode_s: float, row_s: float, target_s: float) -> None:
    """On a machine where a step costs a + b * rows, the chosen rows stay within the target wherever a prompt's least
    share allows it."""
    cost = StepCost()
    for _ in range(60):
        rows = prompt_tokens_beside(cost, target_s, 512)
        cost = observed(cost, decode_tokens=4, prompt_tokens=rows, seconds=decode_s + rows * row_s)
        cost = observed(cost, decode_tokens=4, prompt_tokens=0, seconds=decode_s)
    rows = prompt_tokens_beside(cost, target_s, 512)
    assert rows == LEAST_CHUNK or decode_s + rows * row_s <= target_s * 1.01


def played(first_s: float, free_rows: int, row_s: float, decoding: int) -> int:
    """The draft rows that are settled on where a step costs `first_s` up to `free_rows` rows, and then `row_s` each."""
    cost = StepCost()
    for _ in range(200):
        rows = decoding + max_drafts(cost, decoding)
        cost = observed(cost, decode_tokens=rows, prompt_tokens=0, seconds=first_s + row_s * max(0, rows - free_rows))
        cost = observed(
            cost, decode_tokens=decoding, prompt_tokens=0, seconds=first_s + row_s * max(0, decoding - free_rows)
        )
    return max_drafts(cost, decoding)


def test_drafts_fill_a_step_as_far_as_rows_are_cheap() -> None:
    assert played(0.040, 32, 0.001, decoding=1) == SIZES[-1] - 1, "the weights are all that counts"
    assert played(0.040, 4, 0.100, decoding=1) == 3, "only the free ones"
    assert played(0.040, 4, 0.006, decoding=16) == 0, "every row costs as much as any other"
    assert played(0.040, 4, 0.006, decoding=2) > 2, "each saves half a step"


def test_nothing_is_guessed_before_a_step_was_measured_and_then_one_size_more_at_a_time() -> None:
    assert max_drafts(StepCost(), 1) == 0
    cost = observed(StepCost(), decode_tokens=1, prompt_tokens=0, seconds=0.04)
    assert max_drafts(cost, 1) == 1
    assert max_drafts(observed(cost, decode_tokens=2, prompt_tokens=0, seconds=0.04), 1) == 2
    assert max_drafts(observed(cost, decode_tokens=2, prompt_tokens=0, seconds=0.4), 1) == 2, (
        "the next size may still pay"
    )


def test_one_odd_measurement_does_not_rule_out_a_size_for_ever() -> None:
    cost = StepCost()
    for size in SIZES:
        cost = observed(cost, decode_tokens=size, prompt_tokens=0, seconds=0.04 if size == 1 else 9.0)
    assert max_drafts(cost, 1) == 0
    for _ in range(MEMORY_STEPS):
        cost = observed(cost, decode_tokens=1 + max_drafts(cost, 1), prompt_tokens=0, seconds=0.04)
    assert max_drafts(cost, 1) > 0
