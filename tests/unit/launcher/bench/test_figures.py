"""What `blockrelay bench` makes of arrival times."""

import random

import pytest

from blockrelay_launcher.bench.figures import Round, decode_rate, figures, random_prompts, ratio, token_times
from blockrelay_launcher.percentile import percentile


def steps(first: float, step: float, count: int) -> list[float]:
    return [first + step * i for i in range(count)]


def test_requests_in_step_add_up() -> None:
    assert decode_rate([steps(1.0, 0.1, 11)] * 4) == pytest.approx(40)


def test_only_the_time_in_which_all_decode_counts() -> None:
    # The first waits while the second's prompt is read, and ends before it.
    early, late = [0.0, 1.0, 2.0, *steps(2.1, 0.1, 10)], steps(2.0, 0.1, 30)
    assert decode_rate([early, late]) == pytest.approx(20, rel=0.05)


def test_too_few_tokens_together_count_from_first_to_last() -> None:
    assert decode_rate([[0.0, 0.5], [1.0, 1.5]]) == pytest.approx(4)


def test_tokens_that_come_at_once_do_not_divide_by_zero() -> None:
    assert decode_rate([[1.0, 1.0]]) > 0


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_a_percentile_is_one_of_the_values(share: float, value: int) -> None:
    assert percentile([float(i) for i in range(100, 0, -1)], share) == value


def test_an_entry_has_medians_of_rounds_and_waits_of_all_requests() -> None:
    rounds = [Round(0.0, [steps(t, 0.01, 5), steps(2 * t, 0.01, 5)], client_cpu_s=t / 10) for t in (0.1, 0.3, 0.2)]
    entry = figures(rounds, prompt=7)
    assert (entry["requests"], entry["prompt"], entry["new"]) == (2, 7, 5)
    assert entry["prefill_ms"] == pytest.approx(400)
    assert entry["prompt_tok_s"] == pytest.approx(35)
    assert entry["ttft_ms_p50"] == pytest.approx(200)
    assert entry["itl_ms_p50"] == entry["itl_ms_p99"] == pytest.approx(10)
    assert entry["tok_s"] == pytest.approx(10 / 0.44, abs=0.01)
    assert entry["client_cpu_s"] == pytest.approx(0.02)
    assert entry["rounds"]["prefill_ms"] == pytest.approx([200, 600, 400])


def test_tokens_that_come_together_share_the_time_since_the_last_ones() -> None:
    """Tokens that come together share their time, as where workers guess tokens ahead."""
    came = [1.0, 1.4, 1.4, 1.4, 1.4, 1.6, 1.6]
    assert token_times(came) == pytest.approx([0.1] * 6)
    entry = figures([Round(0.0, [came])], prompt=1)
    assert entry["itl_ms_p50"] == pytest.approx(100)
    assert entry["tokens_at_once"] == pytest.approx(7 / 3, abs=0.01)
    assert token_times([1.0, 1.0]) == [], "nobody knows"
    assert figures([Round(0.0, [[1.0, 1.0]])], prompt=1)["itl_ms_p50"] is None


def test_in_process_has_no_client() -> None:
    assert "client_cpu_s" not in figures([Round(0.0, [[1.0, 2.0]])], prompt=1)


def test_the_ratio_is_of_rounds_in_pairs() -> None:
    # Both sides of the second pair ran while the machine was twice as slow.
    fast, slow = Round(0.0, [steps(1.0, 0.1, 5)]), Round(0.0, [steps(2.0, 0.2, 5)])
    assert ratio([fast, slow], [fast, slow], prompt=3) == {"requests": 1, "prompt": 3, "decode": 1.0, "prefill": 1.0}
    assert ratio([slow], [fast], prompt=3)["decode"] == ratio([slow], [fast], prompt=3)["prefill"] == 0.5


def test_prompts_differ_from_the_first_token_on() -> None:
    prompts = random_prompts(random.Random(1), 32000, 16, 128)
    assert {len(prompt) for prompt in prompts} == {128} and len({prompt[0] for prompt in prompts}) == 16
    assert all(0 <= token < 32000 for prompt in prompts for token in prompt)
