"""Laws of text by position: the events are a function of the tokens, and together they are the text."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.tokenizer import Tokenizer, VisibleText
from tests.support.models.tokenizers import byte_level, sentencepiece

_TOKENIZERS = [
    Tokenizer(library.to_str()) for library in (byte_level(), sentencepiece(), sentencepiece(metaspace=True))
]
_tokenizers = st.sampled_from(_TOKENIZERS)
#: Bytes of an emoji, plain letters and whole words: characters split over tokens are common, as is nonsense.
_tokens = st.lists(
    st.one_of(
        st.sampled_from([2, 3, *range(60, 75), *range(258, 270)]),
        st.integers(0, 275),
        st.sampled_from("🙂é日".encode()).map(lambda byte: byte + 3),
    ),
    max_size=40,
)
#: Often empty, of special tokens alone, of spaces, or ended within a character.
_prompts = st.one_of(st.lists(st.sampled_from([1, 35, 259, 260]), max_size=3), _tokens)
_stops = st.lists(st.text(st.sampled_from("abloEND hé🙂\ufffd"), min_size=1, max_size=5), max_size=3)


def _after(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], *, final: bool) -> str:
    """What `tokens` add to the text of `prompt`, by the definition: both together without the prompt's own."""
    before = _whole(tokenizer, prompt, final=False)
    whole = _whole(tokenizer, [*prompt, *tokens], final=final)
    assert whole.startswith(before)
    return whole[len(before) :]


def _whole(tokenizer: Tokenizer, tokens: Sequence[int], *, final: bool) -> str:
    """The text of `tokens` from scratch: join the bytes, strip the first space, keep complete characters."""
    raw = b"".join(tokenizer.bytes.of(token) for token in tokens)
    if tokenizer.bytes.strip_start and raw.startswith(b" "):
        raw = raw[1:]
    whole = raw.decode(errors="replace")
    if final:
        return whole
    for cut in range(min(3, len(raw)), 0, -1):
        # Incomplete: a beginning of a character that some continuation makes valid.
        tail = raw[-cut:]
        if any(_valid(tail + bytes(rest)) for rest in _continuations(tail)):
            return raw[:-cut].decode(errors="replace")
    return whole


def _continuations(tail: bytes) -> list[list[int]]:
    first = tail[0]
    size = 2 if first >> 5 == 0b110 else 3 if first >> 4 == 0b1110 else 4 if first >> 3 == 0b11110 else 0
    missing = size - len(tail)
    return [[byte] * missing for byte in (0x80, 0x90, 0xA0, 0xBF)] if missing > 0 else []


def _valid(raw: bytes) -> bool:
    try:
        return len(raw.decode()) == 1
    except UnicodeDecodeError:
        return False


def _visible(text: str, stop: Sequence[str], early: int = 0) -> tuple[str, bool]:
    """visible() by its definition: grow the text character by character. What ends within the `early` ones is text."""
    for end in range(early + 1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))], True
    held = max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
    return text[: len(text) - held], False


@given(_tokenizers, _prompts, _tokens, _stops, st.sampled_from([0, 0, 1, 5, 20]))
def test_every_position_equals_the_computation_from_scratch(
    tokenizer: Tokenizer, prompt: list[int], tokens: list[int], stop: list[str], fewest: int
) -> None:
    visible = VisibleText(tokenizer, SamplingParams(stop=tuple(stop), min_tokens=fewest, max_tokens=99), prompt=prompt)
    shown = ""
    early = len(_after(tokenizer, prompt, tokens[:fewest], final=False))
    for position, token in enumerate(tokens, 1):
        shown += visible.push(token)
        expected, stopped = _visible(_after(tokenizer, prompt, tokens[:position], final=False), stop, early)
        assert (shown, visible.stopped) == (expected, stopped)
        if stopped:
            break
    shown += visible.finish()
    if visible.stopped:
        return
    assert shown == _after(tokenizer, prompt, tokens, final=True)
    if not prompt:
        assert shown == tokenizer.decode(tokens)


@given(_tokenizers, _prompts, _tokens, _stops, st.integers(0, 40))
def test_a_reader_that_comes_later_continues_where_another_stopped(
    tokenizer: Tokenizer, prompt: list[int], tokens: list[int], stop: list[str], position: int
) -> None:
    first, second = (VisibleText(tokenizer, SamplingParams(stop=tuple(stop)), prompt=prompt) for _ in range(2))
    shown = first.push_all(tokens[:position])
    assert second.push_all(tokens[:position]) == shown
    assert first.push_all(tokens[position:]) == second.push_all(tokens[position:])
    assert first.finish() == second.finish()


@given(st.text(max_size=30).filter(lambda text: "<" not in text))
def test_what_was_encoded_decodes_to_itself(text: str) -> None:
    tokenizer = _TOKENIZERS[0]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
