"""Where a request ends."""

from typing import Any

import pytest

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.sampling.stop_conditions import Progress, advance
from tests.support.models.tokenizers import byte_level


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level().to_str())


def _reasons(tokens: list[int], *, prompt: int = 3, context: int = 100, **params: Any) -> list[str | None]:
    progress = Progress(SamplingParams(**params), prompt=[0] * prompt, context=context, eos_ids=(1, 2), tokenizer=None)
    return [advance(progress, token) for token in tokens]


def test_a_text_ends_at_its_length() -> None:
    assert _reasons([5, 5, 5], max_tokens=3) == [None, None, "length"]


def test_a_text_ends_where_the_context_does() -> None:
    assert _reasons([5, 5], max_tokens=50, context=5) == [None, "length"]


def test_each_of_the_models_end_tokens_ends_it() -> None:
    assert _reasons([5, 1]) == [None, "stop"]
    assert _reasons([2]) == ["stop"]


def test_an_end_token_may_be_ignored_but_the_requests_own_is_not() -> None:
    assert _reasons([1, 2, 9], ignore_eos=True, stop_token_ids=(9,)) == [None, None, "stop"]


def test_an_end_token_in_the_last_place_is_a_stop() -> None:
    assert _reasons([5, 1], max_tokens=2) == [None, "stop"]


def test_a_stop_string_ends_it_with_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    progress = Progress(
        SamplingParams(stop=("b🙂",), max_tokens=6), prompt=[0], context=50, eos_ids=(), tokenizer=tokenizer
    )
    reasons = [advance(progress, token) for token in tokenizer.encode("ab🙂")]
    assert reasons == [None] * 5 + ["stop"]


def test_a_stop_string_may_contain_the_name_of_a_special_token_that_is_shown(tokenizer: Tokenizer) -> None:
    (mark,) = tokenizer.bytes.specials("</s>")
    tokens = [*tokenizer.encode("a", add_special_tokens=False), mark]
    for shown, reason in (((mark,), "stop"), ((), None)):
        progress = Progress(
            SamplingParams(stop=("a</",)), prompt=[0], context=50, eos_ids=(), tokenizer=tokenizer, shown=shown
        )
        assert [advance(progress, token) for token in tokens] == [None, reason]


def test_nothing_comes_behind_the_end() -> None:
    with pytest.raises(AssertionError, match="finished"):
        _reasons([1, 5])


def test_a_request_without_room_is_over_before_it_begins() -> None:
    progress = Progress(SamplingParams(max_tokens=0), prompt=[0] * 3, context=9, eos_ids=(), tokenizer=None)
    assert progress.finish_reason == "length"
