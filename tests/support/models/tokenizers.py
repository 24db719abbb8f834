"""Small tokenizers of both kinds that we support, and the library's own view of them."""

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers

WORDS = ["▁", "▁hello", "▁a", "b", "lo", "é", "日", "\n", ".", "END", "EN", "D"]


def byte_level() -> LibraryTokenizer:
    """256 bytes, then a few words; <s> and </s> are special, <tool> is added and not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", *alphabet, "Ġhello", "lo", "END", "Ã©"]
    tokenizer = LibraryTokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<tool>", "<日>"])
    return tokenizer


def sentencepiece(*, metaspace: bool = False) -> LibraryTokenizer:
    """Like Llama 2's: byte tokens as <0xNN>, words with a mark for the space before them."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = LibraryTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Metaspace() if metaspace else decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer
