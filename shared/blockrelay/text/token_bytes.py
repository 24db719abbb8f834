"""The bytes that each token of a `tokenizer.json` stands for.

Covers the decoders of the model families that we convert: `ByteLevel` (Llama 3, Qwen, Mistral Nemo and our own) and the
sentencepiece kind (Llama 2, Mistral: `Replace`, `ByteFallback`, `Fuse`, `Strip` or `Metaspace`). With both, the text of
a list of tokens is the concatenation of their bytes, which makes text by position possible.
"""

import json
import re
from typing import Any, cast

from blockrelay.errors import BlockFolderError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of every token. Ids that the tokenizer does not know (padded vocabularies) have none."""

    def __init__(self, definition: str) -> None:
        """`definition` is the text of tokenizer.json. Raises BlockFolderError for a decoder that is not supported."""
        parsed = cast(dict[str, Any], json.loads(definition))
        steps = _steps(parsed.get("decoder"))
        #: Spaces at the very beginning of a text that are not part of it.
        self.strip_start = _strip_start(steps)
        self._bytes: dict[int, bytes] = {}
        vocabulary = cast(object, parsed["model"]["vocab"])
        if isinstance(vocabulary, list):  # Unigram: pairs of token and score, the id is the index
            names = {str(pair[0]): index for index, pair in enumerate(cast(list[list[Any]], vocabulary))}
        else:
            names = cast(dict[str, int], vocabulary)
        for name, token in names.items():
            self._bytes[token] = _decode(name, steps)
        self._special: dict[int, bytes] = {}
        for added in cast(list[dict[str, Any]], parsed.get("added_tokens") or []):
            token, content = int(added["id"]), str(added["content"])
            if added.get("special"):
                self._special[token] = content.encode()
                self._bytes[token] = b""
            else:  # an added token is spelled as in texts, never in ByteLevel's alphabet
                self._bytes[token] = _decode(content, [step for step in steps if step["type"] != "ByteLevel"])

    def of(self, token: int) -> bytes:
        """Returns the bytes that `token` adds to a text; none for special and unknown tokens."""
        return self._bytes.get(token, b"")

    def specials(self, text: str) -> list[int]:
        """Returns the special tokens that are spelled `text`."""
        return [token for token, content in self._special.items() if content.decode() == text]

    def shown(self, token: int) -> bytes:
        """Returns the bytes of `token` for lists of single tokens: those of its name if it is special, else as `of`."""
        return self._special.get(token) or self.of(token)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the steps of the decoder in tokenizer.json. Raises BlockFolderError for one that is not supported."""
    if decoder is None:
        raise BlockFolderError("tokenizer.json has no decoder: we cannot turn its tokens into text")
    steps = cast(list[dict[str, Any]], decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]
    for step in steps:
        kind = step["type"]
        if kind not in ("ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"):
            raise BlockFolderError(f"tokenizer.json has a decoder of type {kind}, which is not supported")
        if kind == "Replace" and "String" not in step["pattern"]:
            raise BlockFolderError("tokenizer.json has a Replace decoder with a pattern, which is not supported")
        if kind == "Strip" and (step["content"] != " " or step["stop"]):
            raise BlockFolderError("tokenizer.json has a Strip decoder that does not strip leading spaces only")
    return steps


def _strip_start(steps: list[dict[str, Any]]) -> int:
    """Returns the number of spaces that the decoder's `steps` take off the beginning of a text."""
    for step in steps:
        if step["type"] == "Strip":
            return int(step["start"])
        if step["type"] == "Metaspace":
            # Older files have add_prefix_space, newer ones prepend_scheme.
            prefixed = (
                step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
            )
            return 1 if prefixed else 0
    return 0


def _decode(name: str, steps: list[dict[str, Any]]) -> bytes:
    """Returns the bytes of one token by the decoder's steps. `Fuse` and `Strip` concern the whole text, not this."""
    for step in steps:
        match step["type"]:
            case "ByteLevel":
                try:
                    return bytes([_BYTE_OF[character] for character in name])
                except KeyError:
                    return name.encode()
            case "Replace":
                name = name.replace(str(step["pattern"]["String"]), str(step["content"]))
            case "Metaspace":
                name = name.replace(str(step["replacement"]), " ")
            case "ByteFallback":
                if byte := _BYTE_TOKEN.fullmatch(name):
                    return bytes([int(byte[1], 16)])
            case _:
                pass
    return name.encode()


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte for each printable character of GPT-2's encoder (the inverse of its `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
