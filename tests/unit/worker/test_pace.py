"""The pace that a worker tells: right where it works, and never better than what it has seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay_worker.pace import SIZES, Measured, PaceMeter, Window, observed, pace


def window(row_s: float, token_s: float, *, rows: int, tokens: int, running: float) -> Window:
    """What a machine of this speed does."""
    return Window(row_s * rows + token_s * tokens, running, rows, tokens)


def test_nothing_is_told_before_a_token() -> None:
    assert pace(Measured()) is None
    assert pace(observed(Measured(), Window(1.0, 1, 100, 0))) is None
    assert observed(Measured(), Window(1.0, 1, 0, 0)) == Measured()


def test_tokens_and_prompts_apart_are_measured_exactly() -> None:
    known = observed(Measured(), Window(1.0, 4, 0, 200))
    known = observed(known, Window(1.0, 1, 500, 0))
    told = pace(known)
    assert told is not None
    assert (told.row_s, told.step_s, told.batch) == (pytest.approx(0.002), pytest.approx(4 * 0.005), 4)


@given(
    row_s=st.floats(1e-5, 1e-2),
    token_s=st.floats(1e-4, 1e-1),
    rows=st.integers(1, 1000),
    tokens=st.integers(1, 1000),
    running=st.floats(1, 200),
    before=st.floats(0.1, 10),
)
def test_a_mixture_that_goes_on_is_foretold(
    row_s: float, token_s: float, rows: int, tokens: int, running: float, before: float
) -> None:
    """However it began, the time of the work at hand comes out right; one part may be wrong for the other."""
    size = next(s for s in SIZES if running <= s)
    known = Measured(row_s * before, {size: token_s / before})
    seen = window(row_s, token_s, rows=rows, tokens=tokens, running=running)
    for _ in range(40):
        known = observed(known, seen)
    told = pace(known)
    assert told is not None
    foretold = told.row_s * rows + told.step_s / told.batch * tokens
    assert foretold == pytest.approx(seen.seconds, rel=0.01)


def test_more_at_once_than_ever_seen_is_no_faster_per_token() -> None:
    known = observed(Measured(), Window(1.0, 1, 0, 50))
    told = pace(known)
    assert told is not None and told.step_s / told.batch == pytest.approx(0.02)
    known = observed(known, Window(1.0, 30, 0, 400))
    told = pace(known)
    assert told is not None and told.batch == 32 and told.step_s / told.batch == pytest.approx(0.0025)
    assert pace(observed(known, Window(1.0, 1, 0, 50))) == told, "few at once say nothing about many"


def test_idle_time_does_not_count() -> None:
    meter = PaceMeter()
    meter.look(0.0, 2)
    meter.add(rows=0, tokens=10)
    meter.look(0.3, 0)
    meter.look(100.0, 2)
    meter.add(rows=0, tokens=10)
    assert meter.pace is None
    meter.look(100.3, 0)
    assert meter.pace is not None and meter.pace.step_s / meter.pace.batch == pytest.approx(0.03)
