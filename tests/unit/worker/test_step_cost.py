"""How many prompt rows go along with decode rows: figures in, a number out."""

from hypothesis import given
from hypothesis import strategies as st

from blockrelay_worker.step_cost import FIRST_ROWS, LEAST_ROWS, StepCost, observed, prompt_rows_beside


def test_rows_fill_the_time_that_decoding_leaves() -> None:
    assert prompt_rows_beside(StepCost(decode_s=0.05, prompt_row_s=0.001), 0.25, 512) == 192


def test_cheap_rows_are_bounded_by_the_batch_alone() -> None:
    assert prompt_rows_beside(StepCost(decode_s=0.001, prompt_row_s=0.0001), 0.25, 512) == 512


def test_a_prompt_always_gets_on() -> None:
    assert prompt_rows_beside(StepCost(decode_s=0.9, prompt_row_s=0.01), 0.25, 512) == LEAST_ROWS
    assert prompt_rows_beside(StepCost(decode_s=0.9, prompt_row_s=0.01), 0.25, 8) == 8


def test_before_anything_was_measured_a_small_chunk_goes() -> None:
    assert prompt_rows_beside(StepCost(), 0.25, 512) == FIRST_ROWS


def test_what_a_step_says_about_its_rows() -> None:
    cost = observed(StepCost(), decode_rows=0, prompt_rows=100, seconds=0.2)
    assert cost == StepCost(None, 0.002)
    cost = observed(cost, decode_rows=4, prompt_rows=0, seconds=0.1)
    assert cost == StepCost(0.1, 0.002)
    assert observed(cost, decode_rows=4, prompt_rows=8, seconds=9.0) == cost, "too few rows to tell"
    mixed = observed(cost, decode_rows=4, prompt_rows=100, seconds=0.3)
    assert mixed.prompt_row_s is not None and abs(mixed.prompt_row_s - 0.002) < 1e-9 and mixed.decode_s == 0.1


@given(st.floats(1e-4, 1.0), st.floats(1e-6, 1e-2), st.floats(0.01, 1.0))
def test_the_bound_leads_to_the_target(decode_s: float, row_s: float, target_s: float) -> None:
    """On a machine where a step costs a + b * rows, the chosen rows stay within the target wherever a prompt's least
    share allows it."""
    cost = StepCost()
    for _ in range(60):
        rows = prompt_rows_beside(cost, target_s, 512)
        cost = observed(cost, decode_rows=4, prompt_rows=rows, seconds=decode_s + rows * row_s)
        cost = observed(cost, decode_rows=4, prompt_rows=0, seconds=decode_s)
    rows = prompt_rows_beside(cost, target_s, 512)
    assert rows == LEAST_ROWS or decode_s + rows * row_s <= target_s * 1.01
