"""Makes a tokenizer.json from the metadata of a GGUF file, for the kind that SmolLM2 has: bytes, BPE, single digits."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from blockrelay.errors import UsageError

#: GGUF's values of `tokenizer.ggml.model` and `tokenizer.ggml.pre`.
KIND = ("gpt2", "smollm")
#: The type of a token that stands for no text, such as the end of a turn.
_CONTROL = 3


def tokenizer_of(metadata: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the text of tokenizer.json and the content of tokenizer_config.json.

    Raises UsageError for a tokenizer of another kind.
    """
    ours = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind = (ours["model"], ours.get("pre", ""))
    if kind != KIND:
        raise UsageError(f"the tokenizer of the GGUF file is {'/'.join(kind)}; {'/'.join(KIND)} is read")
    tokens: list[str] = ours["tokens"]
    merges = [tuple(merge.split(" ")) for merge in ours["merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))  # pyright: ignore[reportArgumentType]
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_alone])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, of in zip(tokens, ours["token_type"], strict=True) if of == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ours["bos_token_id"]],
        "eos_token": tokens[ours["eos_token_id"]],
        "unk_token": tokens[ours["unknown_token_id"]],
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    return tokenizer.to_str(), about
