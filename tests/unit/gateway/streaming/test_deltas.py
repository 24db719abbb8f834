"""Log entries become text by position; every reader, whenever it comes, gets the same text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockrelay.errors import Cancelled, DeadlineExceeded, ExecutionError
from blockrelay.protocol.messages import EndEntry, EndReason, LogEntry, TokenEntry, TokenLogprobs
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.streaming.deltas import CollectedAnswer, Relay, failure, finish_reason


def end(position: int, reason: EndReason = "length", **meta: object) -> EndEntry:
    return EndEntry(position, reason, dict(meta), (), "n1")


def log(tokens: list[int], reason: EndReason = "length") -> list[LogEntry]:
    return [*(TokenEntry(at, token) for at, token in enumerate(tokens, 1)), end(len(tokens) + 1, reason)]


def answer(tokenizer: Tokenizer | None, params: SamplingParams, entries: list[LogEntry]) -> CollectedAnswer:
    relay, collected = Relay(tokenizer, params, (2,), ()), CollectedAnswer()
    for entry in entries:
        collected.add(relay.push(entry))
    return collected


@given(st.lists(st.integers(3, 511), max_size=40))
def test_the_pieces_add_up_to_the_text_of_the_tokens(tokenizer: Tokenizer, tokens: list[int]) -> None:
    collected = answer(tokenizer, SamplingParams(), log(tokens))
    assert collected.text == tokenizer.decode(tokens)
    assert collected.token_ids == tokens


@given(st.lists(st.integers(3, 511), min_size=1, max_size=30), st.text("ae t", min_size=1, max_size=3))
def test_an_offset_is_what_was_shown_before(tokenizer: Tokenizer, tokens: list[int], stop: str) -> None:
    relay, shown = Relay(tokenizer, SamplingParams(stop=(stop,)), (2,), ()), 0
    for entry in log(tokens):
        delta = relay.push(entry)
        assert delta.offset == shown
        shown += len(delta.text)


def test_the_token_that_ends_the_text_has_no_text_but_counts(tokenizer: Tokenizer) -> None:
    said = tokenizer.encode("Tom", add_special_tokens=False)
    collected = answer(tokenizer, SamplingParams(), log([*said, 2], "stop"))
    assert collected.text == "Tom"
    assert collected.token_ids == [*said, 2]


def test_a_stop_string_is_cut_and_never_shown_in_part(tokenizer: Tokenizer) -> None:
    said = tokenizer.encode("Anna has two apples", add_special_tokens=False)
    relay = Relay(tokenizer, SamplingParams(stop=("two app",)), (2,), ())
    texts = [relay.push(entry).text for entry in log(said, "stop")]
    assert "".join(texts) == "Anna has "


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    collected = answer(None, SamplingParams(), log([5, 6]))
    assert (collected.text, collected.token_ids) == ("", [5, 6])


def test_log_probabilities_come_with_their_token(tokenizer: Tokenizer) -> None:
    entry = TokenEntry(1, 5, TokenLogprobs(-0.5, ((5, -0.5), (6, -1.5))).encode())
    delta = Relay(tokenizer, SamplingParams(logprobs=2), (), ()).push(entry)
    assert delta.logprobs == TokenLogprobs(-0.5, ((5, -0.5), (6, -1.5)))


@pytest.mark.parametrize(
    ("reason", "word", "error"),
    [
        ("stop", "stop", None),
        ("length", "length", None),
        ("tensor", None, None),
        ("error", None, ExecutionError),
        ("expired", None, DeadlineExceeded),
        ("cancelled", None, Cancelled),
    ],
)
def test_every_end_is_a_word_or_an_error(reason: EndReason, word: str | None, error: type[Exception] | None) -> None:
    entry = end(3, reason)
    assert finish_reason(entry) == word
    found = failure(entry)
    assert found is None if error is None else isinstance(found, error)


def test_an_error_names_the_block_and_says_what_happened() -> None:
    found = failure(end(3, "error", error="out of memory", failed_block="block_7"))
    assert isinstance(found, ExecutionError)
    assert (str(found), found.block) == ("out of memory", "block_7")
