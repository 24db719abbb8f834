"""Tokens to text and back, and text by position.

`visible(p)` is the longest prefix of the text of tokens 1..p that is complete UTF-8 and cannot be the beginning of a
stop string. The event of token p carries what `visible(p)` adds to `visible(p - 1)`, the terminal event the rest. It is
a pure function of the tokens: any gateway continues any stream at any token. Text is made of bytes that tokens stand
for, so it never changes backwards (`Tokenizer.decode` of the tokenizers library can: a later byte token may turn a
whole run of earlier ones into replacement characters).

Only processes that need text import this module (it needs the `tokenizers` package).
"""

import codecs
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as LibraryTokenizer

from blockrelay.errors import BadRequest, BlockFolderError
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.text.token_bytes import TokenBytes

#: Characters from which a text is encoded as a batch of one: the library lets others use the interpreter meanwhile.
LONG_TEXT = 1 << 14
#: Normalisers compose characters: up to so many bytes become one.
COMPOSED = 3


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

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token on its own, as log probabilities show it; a special token's are its name's."""
        return self.bytes.shown(token)


class IncrementalText:
    """Text of a growing list of tokens, characters as soon as they are complete. O(1) per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = self._bytes.strip_start

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


class VisibleText:
    """Text by position of one request (see the module's docstring).

    `stop` strings end the text: the one whose last character comes first, the longest of those, and the text is cut
    before it. `silent` tokens (those that end the request by their id) have no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), silent: frozenset[int] = frozenset()) -> None:
        self._text = IncrementalText(tokenizer)
        self._stop = tuple(stop)
        self._silent = silent
        self._held = ""  # shown to nobody yet: it may be the beginning of a stop string
        self._stopped = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, params: SamplingParams, eos_ids: Sequence[int]) -> "VisibleText":
        """The text of a request with these parameters on a model with these EOS ids."""
        return cls(tokenizer, stop=params.stop, silent=params.end_ids(eos_ids))

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
