"""Tokens to text and back, and text by position.

`visible(p)` is the longest prefix of the text of tokens 1..p that is complete UTF-8 and cannot be the beginning of a
stop string. The event of token p carries what `visible(p)` adds to `visible(p - 1)`, the terminal event the rest. It is
a pure function of the tokens: any gateway continues any stream at any token. What a request's tokens add to its prompt
is the text of both together without the prompt's own: the space that a sentencepiece text begins without is missing at
the beginning of the prompt only, and a character may begin in the prompt. Text is made of bytes that tokens stand for,
so it never changes backwards (`Tokenizer.decode` of the tokenizers library can: a later byte token may turn a whole run
of earlier ones into replacement characters).

Only processes that need text import this module (it needs the `tokenizers` package).
"""

import codecs
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as LibraryTokenizer

from blockrelay.errors import BadRequest, BlockFolderError
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.token_bytes import TokenBytes

#: Characters from which a text is encoded as a batch of one: the library lets others use the interpreter meanwhile.
LONG_TEXT = 1 << 14
#: Normalisers compose characters: up to so many bytes become one.
COMPOSED = 3
#: Bytes of a character of UTF-8 that is not complete yet, at most.
_MOST_INCOMPLETE = 3


class TokenList(Protocol):
    """A list of token ids, or an array of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Tokenizer:
    """A `tokenizer.json`, both ways. Immutable and safe to share between threads."""

    def __init__(self, definition: str) -> None:
        """`definition` is the text of tokenizer.json. Raises BlockFolderError if it cannot be used."""
        try:
            self._library = LibraryTokenizer.from_str(definition)
        except Exception as error:  # the library raises plain Exception
            raise BlockFolderError(f"tokenizer.json cannot be read: {error}") from error
        self._library.no_padding()
        self._library.no_truncation()
        names = self._library.get_vocab(with_added_tokens=True)
        composed = 1 if self._library.normalizer is None else COMPOSED
        #: Bytes of a text that one token stands for, at most.
        self.longest = composed * max((len(name.encode()) for name in names), default=1)
        self.bytes = TokenBytes(definition)

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """Reads `path`. Raises BlockFolderError if it is missing or unusable."""
        try:
            return cls(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise BlockFolderError(f"tokenizer {path.name} cannot be read: {error}") from error

    @property
    def vocab_size(self) -> int:
        """How many ids the tokenizer knows, added tokens included; the model may have more (padded vocabulary)."""
        return self._library.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of `token`, as the vocabulary or the added tokens spell it; None if it is neither."""
        return self._library.token_to_id(token)

    def added_tokens(self) -> dict[int, str]:
        """Id -> text of the tokens that were added to the vocabulary."""
        return {token: added.content for token, added in self._library.get_added_tokens_decoder().items()}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Chat templates bring their own special tokens and pass False.

        Raises BadRequest for text that is not Unicode (half of a surrogate pair, which JSON can carry).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(
                "the text holds half of a surrogate pair, which is not a character", param="prompt"
            ) from error
        if len(text) < LONG_TEXT:
            return self._library.encode(text, add_special_tokens=add_special_tokens).ids
        (encoded,) = self._library.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def decode(self, tokens: Iterable[int]) -> str:
        """The whole text of `tokens`; what is not complete UTF-8 becomes U+FFFD. Special tokens have no text."""
        decoder = IncrementalText(self)
        return "".join(decoder.push(token) for token in tokens) + decoder.finish()

    def stop_ids(self, stop: Iterable[str]) -> tuple[int, ...]:
        """The special tokens that are spelled as one of the strings `stop`: having no text, they stop by their ids."""
        return tuple(dict.fromkeys(token for text in stop for token in self.bytes.specials(text)))

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token on its own, as log probabilities show it; a special token's are its name's."""
        return self.bytes.shown(token)


class IncrementalText:
    """Text of a growing list of tokens, characters as soon as they are complete. O(1) per token.

    `prompt`: tokens that stand before them, whose own text is not part of it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: TokenList = ()) -> None:
        self._bytes = tokenizer.bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = self._left_to_strip(prompt)
        self._utf8.decode(self._end_of(prompt))

    def push(self, token: int) -> str:
        """The characters that `token` completes."""
        text = self._utf8.decode(self._bytes.of(token))
        while text and self._strip:
            # Tokenizers of the sentencepiece kind put one space before the first word; it is not part of the text.
            if text[0] != " ":
                self._strip = 0
                break
            self._strip -= 1
            text = text[1:]
        return text

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became complete, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _left_to_strip(self, prompt: TokenList) -> int:
        """How many spaces at the beginning of the text are still to come, and not part of it."""
        left = self._bytes.strip_start
        for byte in chain.from_iterable(self._bytes.of(int(prompt[at])) for at in range(len(prompt))):
            if not left or byte != ord(" "):
                return 0
            left -= 1
        return left

    def _end_of(self, prompt: TokenList) -> bytes:
        """The last bytes of the prompt: as many as can be a beginning of a character, and one more."""
        end = b""
        for at in range(len(prompt) - 1, -1, -1):
            end = self._bytes.of(int(prompt[at])) + end
            if len(end) > _MOST_INCOMPLETE:
                break
        return end


class VisibleText:
    """Text by position of one request (see the module's docstring).

    `stop` strings end the text: the one whose last character comes first, the longest of those, and the text is cut
    before it. `silent` tokens (those that end the request by their id) have no text. `prompt` stands before the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        silent: frozenset[int] = frozenset(),
        prompt: TokenList = (),
    ) -> None:
        self._text = IncrementalText(tokenizer, prompt)
        self._stop = tuple(stop)
        self._silent = silent
        self._held = ""  # shown to nobody yet: it may be the beginning of a stop string
        self._stopped = False

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, params: SamplingParams, eos_ids: Sequence[int], prompt: TokenList
    ) -> "VisibleText":
        """The text of a request with this prompt and these parameters on a model with these EOS ids."""
        return cls(tokenizer, stop=params.stop, silent=params.end_ids(eos_ids), prompt=prompt)

    @property
    def stopped(self) -> bool:
        """A stop string was found: nothing more will come."""
        return self._stopped

    def push(self, token: int) -> str:
        """What visible(p) adds, for the next token p."""
        if self._stopped or token in self._silent:
            return ""
        pending = self._held + self._text.push(token)
        if not self._stop:
            return pending
        found = [(start + len(text), start) for text in self._stop if (start := pending.find(text)) >= 0]
        if found:
            self._stopped, self._held = True, ""
            return pending[: min(found)[1]]
        cut = len(pending) - self._possible_start(pending)
        self._held = pending[cut:]
        return pending[:cut]

    def push_all(self, tokens: Iterable[int]) -> str:
        """What the next tokens add together: where a reader continues a stream."""
        return "".join([self.push(token) for token in tokens])

    def finish(self) -> str:
        """What the terminal event adds. Call it once."""
        if self._stopped:
            return ""
        rest, self._held = self._held + self._text.finish(), ""
        return rest

    def _possible_start(self, pending: str) -> int:
        """Length of the longest end of `pending` with which some stop string begins."""
        longest = min(len(pending), max(len(text) for text in self._stop) - 1)
        for length in range(longest, 0, -1):
            end = pending[-length:]
            if any(len(text) > length and text.startswith(end) for text in self._stop):
                return length
        return 0
