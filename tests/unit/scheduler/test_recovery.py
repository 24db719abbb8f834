"""The decisions which workers are dead and which requests are stuck, as tables."""

from typing import Literal

import pytest

from blockrelay_scheduler.recovery import Rescue, UnfinishedRequest, dead_workers, patience_ms, rescues


def test_the_silent_are_dead_and_the_most_silent_come_first() -> None:
    assert dead_workers({"a": 2999, "b": 3000, "c": 90_000, "d": 0}, dead_after_ms=3000) == ["c", "b"]


def test_a_beat_from_the_future_is_as_old_as_the_clock_was_put_back() -> None:
    assert dead_workers({"a": -2999, "b": -3_600_000, "c": 4000}, dead_after_ms=3000) == ["b", "c"]


def test_patience_grows_with_the_prompt() -> None:
    assert patience_ms(0, stalled_after_s=30, prompt_tokens_per_s=100) == 30_000
    assert patience_ms(1000, stalled_after_s=30, prompt_tokens_per_s=100) == 70_000


def request(
    state: str = "running",
    *,
    idle_ms: int = 0,
    tokens: int = 0,
    overdue: int | None = None,
    denied: int | None = None,
) -> UnfinishedRequest:
    return UnfinishedRequest(
        id="r", state=state, run_id="n1", idle_ms=idle_ms, tokens=tokens, overdue_ms=overdue, denied_ms=denied
    )


@pytest.mark.parametrize(
    ("seen", "act"),
    [
        pytest.param(request(idle_ms=29_000), None, id="it moved lately"),
        pytest.param(request(idle_ms=31_000), "rerun", id="it has not moved"),
        pytest.param(request(idle_ms=31_000, tokens=1000), None, id="its prompt is long"),
        pytest.param(request(idle_ms=71_000, tokens=1000), "rerun", id="no prompt is that long"),
        pytest.param(request("queued", idle_ms=10_000_000), None, id="a queued one waits as long as it takes"),
        pytest.param(request("queued", overdue=1), "expire", id="its deadline passed in the queue"),
        pytest.param(request(idle_ms=31_000, overdue=1), "expire", id="a deadline comes before a re-run"),
        pytest.param(request(idle_ms=31_000, overdue=-1), "rerun", id="there is still time"),
        pytest.param(request("queued", denied=5_000), None, id="a GPU may still come"),
        pytest.param(request("queued", denied=5_001), "give_up", id="no GPU came"),
        pytest.param(request(denied=5_001), None, id="one came just now"),
        pytest.param(request("done", idle_ms=90_000, overdue=5), None, id="it ended in the meantime"),
        pytest.param(request("", idle_ms=90_000), None, id="its record is gone"),
    ],
)
def test_a_request_is_rescued(seen: UnfinishedRequest, act: Literal["rerun", "expire", "give_up"] | None) -> None:
    expected = [] if act is None else [Rescue(act, "r", "n1")]
    assert rescues([seen], stalled_after_s=30, prompt_tokens_per_s=100, fallback_wait_s=5) == expected
