"""The measured pace of a worker: right while it works, and recovering towards the best one while it rests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay_worker.scheduling.throughput import (
    RECENT_S,
    REST_S,
    SIZES,
    MeasuredPace,
    PaceMeter,
    PaceWindow,
    observed,
    pace,
    rested,
)


def window(row_s: float, token_s: float, *, rows: int, tokens: int, running: float) -> PaceWindow:
    """What a machine of this speed does."""
    return PaceWindow(row_s * rows + token_s * tokens, running, rows, tokens)


def test_nothing_is_told_before_a_token() -> None:
    assert pace(MeasuredPace()) is None
    assert pace(observed(MeasuredPace(), PaceWindow(1.0, 1, 100, 0))) is None
    assert observed(MeasuredPace(), PaceWindow(1.0, 1, 0, 0)) == MeasuredPace()


def test_tokens_and_prompts_apart_are_measured_exactly() -> None:
    known = observed(MeasuredPace(), PaceWindow(1.0, 4, 0, 200))
    known = observed(known, PaceWindow(1.0, 1, 500, 0))
    told = pace(known)
    assert told is not None
    assert (told.row_s, told.steps) == (pytest.approx(0.002), {4: pytest.approx(4 * 0.005)})


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
    known = MeasuredPace(row_s * before, {size: token_s / before})
    seen = window(row_s, token_s, rows=rows, tokens=tokens, running=running)
    for _ in range(60):
        known = observed(known, seen)
    told = pace(known)
    assert told is not None
    foretold = told.row_s * rows + told.steps[size] / size * tokens
    assert foretold == pytest.approx(seen.seconds, rel=0.01)


def test_few_at_once_and_many_are_told_apart() -> None:
    known = observed(MeasuredPace(), PaceWindow(1.0, 1, 0, 50))
    known = observed(known, PaceWindow(1.0, 30, 0, 400))
    told = pace(known)
    assert told is not None
    assert told.steps == {1: pytest.approx(0.02), 32: pytest.approx(32 * 0.0025)}


def test_a_machine_that_stood_still_is_no_slow_one() -> None:
    known = observed(observed(MeasuredPace(), PaceWindow(1.0, 1, 0, 100)), PaceWindow(600.0, 1, 0, 10))
    assert known.token_s[1] <= 0.0125


def test_what_slowed_it_is_forgotten_without_work() -> None:
    fast, slow = MeasuredPace(0.001, {1: 0.01, 4: 0.002}), MeasuredPace(0.003, {1: 0.03, 4: 0.002})
    assert rested(slow, fast, 0.0) == slow
    assert rested(slow, fast, REST_S).token_s[1] == pytest.approx(0.02)
    assert rested(slow, fast, 20 * REST_S).row_s == pytest.approx(0.001, rel=0.01)


class TestMeter:
    def work(self, meter: PaceMeter, at: float, seconds: float, *, running: int, tokens: int) -> None:
        meter.look(at, running)
        meter.add(rows=0, tokens=tokens)
        meter.look(at + seconds, 0)

    def test_idle_time_does_not_count(self) -> None:
        meter = PaceMeter()
        self.work(meter, 0.0, 0.3, running=2, tokens=10)
        assert meter.pace_at(0.3) is None
        self.work(meter, 100.0, 0.3, running=2, tokens=10)
        told = meter.pace_at(100.3)
        assert told is not None and told.steps[2] / 2 == pytest.approx(0.03)

    def test_company_is_expected_for_a_while(self) -> None:
        meter = PaceMeter()
        self.work(meter, 0.0, 1.0, running=1, tokens=50)
        self.work(meter, 2.0, 1.0, running=16, tokens=300)
        told = [meter.pace_at(at) for at in (3.0, 3.0 + RECENT_S / 2, 4.0 + RECENT_S)]
        assert [t.recent_concurrency for t in told if t] == [16, 16, 1]

    def test_a_slow_time_is_over_for_it_too(self) -> None:
        """Nothing is given to who is believed to be slow, so no work would ever tell the contrary."""
        meter = PaceMeter()
        self.work(meter, 0.0, 1.0, running=1, tokens=100)
        for i in range(40):
            self.work(meter, 2.0 + 2 * i, 1.0, running=1, tokens=10)
        slow, later = meter.pace_at(82.0), meter.pace_at(82.0 + 20 * REST_S)
        assert slow is not None and slow.steps[1] > 0.05
        assert later is not None and later.steps[1] == pytest.approx(0.01, rel=0.05)
        self.work(meter, 82.0 + 20 * REST_S, 1.0, running=1, tokens=100)
        again = meter.pace_at(83.0 + 20 * REST_S)
        assert again is not None and again.steps[1] == pytest.approx(0.01, rel=0.05)
