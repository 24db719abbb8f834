"""The times of a stage's blocks over its last decode steps."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from blockrelay.protocol.block_times import BlockTimes
from blockrelay_worker.engine import block_meter
from blockrelay_worker.engine.block_meter import LEAST_STEPS, WINDOW_S, BlockMeter
from blockrelay_worker.scheduling.work import Work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time, which only the test moves."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(block_meter.time, "monotonic", lambda: clock.now)
    return clock


def decoding(rows: int, position: int) -> Work:
    return cast(Work, SimpleNamespace(rows=rows, position=position, decodes=True))


def prompting(rows: int) -> Work:
    return cast(Work, SimpleNamespace(rows=rows, position=0, decodes=False))


def steps(meter: BlockMeter, count: int, seconds: float, *work: Any) -> None:
    for _ in range(count):
        meter.add(work or (decoding(1, 9),), {"block_3": seconds, "block_4": 2 * seconds})


def known(meter: BlockMeter) -> BlockTimes:
    times = meter.times()
    assert times is not None and times.free_bytes > 0
    return times


def test_means_are_over_decode_steps_alone(clock: SimpleNamespace) -> None:
    meter = BlockMeter(3)
    steps(meter, LEAST_STEPS, 0.25, decoding(1, 9), decoding(3, 27))
    steps(meter, 5, 8.0, decoding(1, 9), prompting(64))
    meter.add((decoding(1, 9),), {})
    times = known(meter)
    assert (times.first, times.seconds, times.rows) == (3, (0.25, 0.5), 4.0)
    assert times.context == (1 * 10 + 3 * 30) / 4
    assert BlockTimes.from_json(times.to_json().encode()) == times


def test_a_few_steps_and_none_since_the_last_call_say_nothing(clock: SimpleNamespace) -> None:
    meter = BlockMeter(3)
    steps(meter, LEAST_STEPS - 1, 1.0)
    assert meter.times() is None
    steps(meter, 1, 1.0)
    assert meter.times() is not None and meter.times() is None
    steps(meter, 1, 1.0)
    assert meter.times() is not None


def test_what_was_long_ago_is_forgotten(clock: SimpleNamespace) -> None:
    meter = BlockMeter(3)
    steps(meter, 20, 1.0)
    clock.now += WINDOW_S
    steps(meter, 20, 3.0)
    assert known(meter).seconds == (2.0, 4.0), "the last window counts beside this one"
    clock.now += WINDOW_S
    steps(meter, 20, 3.0)
    assert known(meter).seconds == (3.0, 6.0)
    clock.now += 3 * WINDOW_S
    steps(meter, LEAST_STEPS, 7.0)
    assert known(meter).seconds == (7.0, 14.0), "after a pause only what came behind it"
