"""Text by position, in examples; tests/properties/test_text_by_position.py has the general rules."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from blockrelay.errors import BadRequest, BlockFolderError
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.tokenizer import Tokenizer, VisibleText
from tests.support.models.tokenizers import WORDS, byte_level, sentencepiece


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level().to_str())


def _text(tokenizer: Tokenizer, *stop: str, prompt: Sequence[int] = ()) -> VisibleText:
    return VisibleText(tokenizer, SamplingParams(stop=stop), prompt=prompt)


def _events(tokenizer: Tokenizer, text: str, *stop: str) -> list[str]:
    """What each token of `text` shows, then what the end shows."""
    visible = _text(tokenizer, *stop)
    return [*(visible.push(token) for token in tokenizer.encode(text)), visible.finish()]


def test_an_emoji_split_over_tokens_appears_when_it_is_complete(tokenizer: Tokenizer) -> None:
    assert _events(tokenizer, "a🙂b") == ["a", "", "", "", "🙂", "b", ""]


def test_a_character_that_never_became_complete_is_flushed_as_a_replacement(tokenizer: Tokenizer) -> None:
    visible = _text(tokenizer)
    assert visible.push_all(tokenizer.encode("ok🙂")[:-1]) == "ok"
    assert visible.finish() == "\ufffd"


def test_what_may_be_a_stop_string_is_held_back_until_it_is_not(tokenizer: Tokenizer) -> None:
    assert _events(tokenizer, "x</y", "</s>") == ["x", "", "", "</y", ""]


def test_a_stop_string_cuts_the_text_before_it(tokenizer: Tokenizer) -> None:
    visible = _text(tokenizer, "STOP")
    assert visible.push_all(tokenizer.encode("one STOP two")) == "one "
    assert visible.stopped
    assert visible.finish() == ""


def test_a_stop_string_that_ends_within_the_fewest_tokens_is_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one STOP two STOP")
    for fewest, text in ((7, "one "), (8, "one STOP two "), (len(tokens), "one STOP two STOP")):
        visible = VisibleText(tokenizer, SamplingParams(stop=("STOP",), min_tokens=fewest, max_tokens=99))
        assert visible.push_all(tokens) + visible.finish() == text


def test_what_was_held_back_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    assert _events(tokenizer, "wait ST", "STOP")[-1] == "ST"


def test_a_stop_string_may_begin_and_end_inside_tokens(tokenizer: Tokenizer) -> None:
    hello, end = tokenizer.encode(" hello", add_special_tokens=False), [258 + 2]
    assert tokenizer.decode(end) == "END"
    visible = _text(tokenizer, "loEN")
    assert visible.push_all([*hello, *end]) == " hel"
    assert visible.stopped


def test_the_stop_string_that_is_complete_first_wins_and_of_two_the_longer(tokenizer: Tokenizer) -> None:
    assert "".join(_events(tokenizer, "abcdef", "cdef", "de")) == "abc"
    assert "".join(_events(tokenizer, "abcdef", "cd", "bcd")) == "a"


def test_the_token_that_ends_a_request_has_no_text(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop_token_ids=tuple(tokenizer.encode("!")))
    visible = VisibleText(tokenizer, params, eos_ids=[1])
    assert visible.push_all([*tokenizer.encode("hi"), 1, *tokenizer.encode("!")]) == "hi"


def test_an_added_token_is_spelled_as_it_is_and_not_in_the_alphabet_of_bytes() -> None:
    library = byte_level()
    library.add_tokens(["đem", "é"])
    tokenizer = Tokenizer(library.to_str())
    for text in ("xđemé <日>", "é"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_stop_string_may_be_the_name_of_a_special_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.stop_ids(["</s>", "s", "<tool>", "<s>"]) == (1, 0)


def test_special_tokens_have_no_text_but_a_name(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([0, *tokenizer.encode("x"), 1]) == "x"
    assert tokenizer.token_bytes(1) == b"</s>"
    assert tokenizer.token_bytes(tokenizer.encode("x")[0]) == b"x"
    assert tokenizer.token_bytes(99_999) == b""


@pytest.mark.parametrize("library", [byte_level(), sentencepiece(), sentencepiece(metaspace=True)])
@pytest.mark.parametrize(
    "text", [" hello", "hello  hello", "a\nb.", "日本 é", "🙂🙃", "", " ", "  a", "<tool> <日> END", "\x00\x7f"]
)
def test_whole_texts_decode_as_the_library_decodes_them(library: LibraryTokenizer, text: str) -> None:
    tokens = library.encode(text).ids
    assert Tokenizer(library.to_str()).decode(tokens) == library.decode(tokens)


def test_the_first_space_of_a_sentencepiece_text_is_not_part_of_it() -> None:
    tokenizer = Tokenizer(sentencepiece().to_str())
    hello = tokenizer.encode("▁hello")
    assert tokenizer.decode(hello) == "hello"
    assert tokenizer.decode(hello * 2) == "hello hello"


@pytest.mark.parametrize("metaspace", [False, True])
def test_what_follows_a_prompt_keeps_its_first_space(metaspace: bool) -> None:
    tokenizer = Tokenizer(sentencepiece(metaspace=metaspace).to_str())
    begin, space, hello = [1], [259 + WORDS.index("▁")], [259 + WORDS.index("▁hello")]
    assert _text(tokenizer, prompt=hello).push_all(hello) == " hello"
    assert _text(tokenizer, prompt=begin).push_all(hello * 2) == "hello hello"
    assert _text(tokenizer, prompt=[*begin, *space]).push_all(hello) == " hello"
    stops = _text(tokenizer, " hel", prompt=hello)
    assert (stops.push_all(hello), stops.stopped) == ("", True)


def test_a_character_that_begins_in_the_prompt_is_what_its_last_token_adds(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a🙂b")
    assert _text(tokenizer, prompt=tokens[:3]).push_all(tokens[3:]) == "🙂b"


def test_text_that_is_not_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Strip", "content": "x", "start": 1, "stop": 0},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
    ],
)
def test_a_decoder_we_cannot_follow_is_refused(decoder: dict[str, Any] | None) -> None:
    definition = json.loads(byte_level().to_str())
    definition["decoder"] = decoder
    with pytest.raises(BlockFolderError, match="decoder"):
        Tokenizer(json.dumps(definition))


def test_a_file_that_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(BlockFolderError, match=r"tokenizer\.json"):
        Tokenizer("{}")


@pytest.mark.parametrize("text", ["Tom has a ball. " * 3000, "a" * 40_000, "\u00e9\U0001f600 " * 9000])
@pytest.mark.parametrize("library", [byte_level(), sentencepiece()], ids=["byte_level", "sentencepiece"])
def test_a_long_text_has_the_tokens_of_the_library(library: LibraryTokenizer, text: str) -> None:
    """It is encoded another way, in which the library lets others run."""
    library.no_truncation()
    assert Tokenizer(library.to_str()).encode(text) == library.encode(text).ids
