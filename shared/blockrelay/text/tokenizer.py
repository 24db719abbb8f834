"""Turns tokens into text and back, and computes the text of a stream by position.

`visible(p)` is the longest prefix of the text of tokens 1..p that is complete UTF-8 and cannot be the beginning of a
stop string. The event of token p carries what `visible(p)` adds to `visible(p - 1)`, the terminal event the rest. It is
a pure function of the tokens: any gateway can continue any stream at any token.

The text of a request is the text of prompt and answer together without that of the prompt. This matters in two cases:
sentencepiece drops a space at the beginning of the prompt only, and a character may begin in the prompt and end in the
answer. Text is made of the tokens' bytes, so it never changes backwards (`Tokenizer.decode` of the tokenizers library
can: a later byte token may turn a whole run of earlier ones into replacement characters).

Only processes that need text import this module (it needs the `tokenizers` package).
"""

import codecs
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as LibraryTokenizer

from blockrelay.errors import BadRequest, BlockFolderError
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.marks import possible_start
from blockrelay.text.token_bytes import TokenBytes

#: Texts of this many characters are encoded as a batch of one, because the library then releases the GIL.
LONG_TEXT = 1 << 14
#: Most bytes that a normaliser composes into one.
COMPOSED = 3
#: Most bytes of a UTF-8 character that is not complete yet.
_MAX_INCOMPLETE = 3


class TokenList(Protocol):
    """A list or an array of token ids."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Tokenizer:
    """The tokenizer of a `tokenizer.json`: text to tokens and back. Immutable, and safe to share between threads."""

    def __init__(self, definition: str) -> None:
        """`definition` is the text of tokenizer.json. Raises BlockFolderError if it cannot be used."""
        try:
            self._library = LibraryTokenizer.from_str(definition)
        except Exception as error:  # the library raises plain Exception
            raise BlockFolderError(f"tokenizer.json cannot be read: {error}") from error
        #: The text of tokenizer.json.
        self.definition = definition
        self._library.no_padding()
        self._library.no_truncation()
        names = self._library.get_vocab(with_added_tokens=True)
        composed = 1 if self._library.normalizer is None else COMPOSED
        #: Most bytes of a text that one token stands for.
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
        """Number of ids that the tokenizer knows, added tokens included. Models may have more (padding)."""
        return self._library.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Returns the id of `token`, as the vocabulary or the added tokens spell it; None if neither has it."""
        return self._library.token_to_id(token)

    def added_tokens(self) -> dict[int, str]:
        """Returns the texts of the tokens that were added to the vocabulary, by id."""
        return {token: added.content for token, added in self._library.get_added_tokens_decoder().items()}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`.

        `add_special_tokens` is False for texts of chat templates, which have special tokens already. Raises BadRequest
        for text that is not Unicode (half of a surrogate pair, which JSON can carry).
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
        """Returns the text of `tokens`. What is not complete UTF-8 becomes U+FFFD; special tokens have no text."""
        decoder = IncrementalText(self)
        return "".join(decoder.push(token) for token in tokens) + decoder.finish()

    def spell(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens` with the names of special tokens. What is not complete UTF-8 becomes U+FFFD.

        Encoding it again without adding special tokens gives the same text, and mostly the same tokens.
        """
        text = b"".join(map(self.bytes.shown, tokens)).decode("utf-8", "replace")
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self.bytes.strip_start) :]

    def name_of(self, token: int) -> str:
        """Returns a token as the vocabulary spells it, such as `Ġthe`; empty for an id that the tokenizer lacks."""
        return self._library.id_to_token(token) or ""

    def stop_ids(self, stop: Iterable[str]) -> tuple[int, ...]:
        """Returns the ids of the special tokens that are spelled like one of the strings in `stop`.

        They have no text, so a stop string cannot find them: a request stops at their ids.
        """
        return tuple(dict.fromkeys(token for text in stop for token in self.bytes.specials(text)))

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of one token as log probabilities show it; for a special token those of its name."""
        return self.bytes.shown(token)


class IncrementalText:
    """The text of a growing list of tokens. A character comes as soon as it is complete. O(1) for each token."""

    def __init__(self, tokenizer: Tokenizer, prompt: TokenList = (), shown: Collection[int] = ()) -> None:
        """`prompt`: the tokens before the first that is pushed. Their own text is not given out.

        `shown` has the special tokens whose names are part of the text.
        """
        self._bytes, self._shown = tokenizer.bytes, shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = self._left_to_strip(prompt)
        self._utf8.decode(self._end_of(prompt))

    def push(self, token: int) -> str:
        """Adds `token` and returns the characters that it completes."""
        text = self._utf8.decode(self._bytes.shown(token) if token in self._shown else self._bytes.of(token))
        while text and self._strip:
            # Tokenizers of the sentencepiece kind put a space before the first word, which is not part of the text.
            if text[0] != " ":
                self._strip = 0
                break
            self._strip -= 1
            text = text[1:]
        return text

    def finish(self) -> str:
        """Returns the rest of the text: U+FFFD if the last character is not complete, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _left_to_strip(self, prompt: TokenList) -> int:
        """Returns the number of leading spaces behind `prompt` that are not part of the text."""
        left = self._bytes.strip_start
        for byte in chain.from_iterable(self._bytes.of(int(prompt[at])) for at in range(len(prompt))):
            if not left or byte != ord(" "):
                return 0
            left -= 1
        return left

    def _end_of(self, prompt: TokenList) -> bytes:
        """Returns the last bytes of the prompt: more than an incomplete character can have."""
        end = b""
        for at in range(len(prompt) - 1, -1, -1):
            end = self._bytes.of(int(prompt[at])) + end
            if len(end) > _MAX_INCOMPLETE:
                break
        return end


class VisibleText:
    """The text by position of one request: `visible(p)` of the module's docstring, token by token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        eos_ids: Sequence[int] = (),
        prompt: TokenList = (),
        shown: Collection[int] = (),
    ) -> None:
        """`params`: those of the request; of its stop strings the one whose last character comes first ends the text,
        and of several the longest. The text is cut before it. One that ends within `min_tokens` tokens is text. Tokens
        that end the request by their ids, such as `eos_ids`, have no text. `prompt` has the tokens before the text,
        `shown` special tokens that have text."""
        self._text = IncrementalText(tokenizer, prompt, shown)
        self._stop = params.stop
        self._left = params.min_tokens  # tokens within which no stop string ends the text
        self._silent = params.end_ids(eos_ids)
        self._held = ""  # not given out yet: it may be the beginning of a stop string
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """True once a stop string was found: no more text will come."""
        return self._stopped

    def push(self, token: int) -> str:
        """Adds the next token p and returns what `visible(p)` adds to `visible(p - 1)`."""
        too_early, self._left = self._left > 0, self._left - 1
        if self._stopped or token in self._silent:
            return ""
        held, pending = len(self._held), self._held + self._text.push(token)
        if not self._stop:
            return pending
        matches = [  # that end in the text of this token: earlier ones ended too early
            (start + len(text), start)
            for text in self._stop
            if (start := pending.find(text, max(0, held - len(text) + 1))) >= 0
        ]
        if matches and not too_early:
            self._stopped, self._held = True, ""
            return pending[: min(matches)[1]]
        cut = len(pending) - possible_start(pending, self._stop)
        self._held = pending[cut:]
        return pending[:cut]

    def push_all(self, tokens: Iterable[int]) -> str:
        """Adds the next tokens and returns the text that they add together, for a reader that continues a stream."""
        return "".join([self.push(token) for token in tokens])

    def finish(self) -> str:
        """Returns the text that the terminal event adds. Called once, at the end."""
        if self._stopped:
            return ""
        rest, self._held = self._held + self._text.finish(), ""
        return rest
