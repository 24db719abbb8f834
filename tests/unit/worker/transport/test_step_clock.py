"""The clock of a step: a worker that waits for Redis is not stuck."""

import threading
from collections.abc import Iterator

import pytest

from blockrelay_worker.transport import redis_links
from blockrelay_worker.transport.redis_links import StepClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The monotonic clock, as a test sets it."""
    time = [100.0]
    monkeypatch.setattr(redis_links.time, "monotonic", lambda: time[0])
    yield time


def test_it_stands_still_while_its_thread_waits(now: list[float]) -> None:
    clock = StepClock()
    assert clock.age() == 0.0
    clock.begin()
    now[0] += 2
    with clock.waiting():
        now[0] += 60
        assert clock.age() == 2.0
        with clock.waiting():
            now[0] += 60
        assert clock.age() == 2.0, "what waits inside changes nothing"
    now[0] += 3
    assert clock.age() == 5.0
    clock.end()
    assert clock.age() == 0.0


def test_a_part_that_is_done_counts_no_more(now: list[float]) -> None:
    clock = StepClock()
    clock.progressed()
    assert clock.age() == 0.0, "there is no step"
    clock.begin()
    now[0] += 20
    clock.progressed()
    now[0] += 1
    assert clock.age() == 1.0


def test_another_thread_that_waits_does_not_stop_it(now: list[float]) -> None:
    clock = StepClock()
    clock.begin()

    def wait() -> None:
        with clock.waiting():
            now[0] += 60

    other = threading.Thread(target=wait)
    other.start()
    other.join()
    assert clock.age() == 60.0
