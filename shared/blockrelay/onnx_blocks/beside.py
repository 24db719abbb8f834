"""Reads the files beside ONNX blocks made by others: the length of the context, and everything about text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockrelay.block_folder.manifest import CHAT_TEMPLATE_NAME, TOKENIZER_NAME
from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import UsageError
from blockrelay.text.text_assets import SPECIAL_TOKENS_NAME, Texts, first_id, optional_json, read_texts, token_ids

#: Positions of a context whose length no file and no user names.
DEFAULT_CONTEXT = 4096
#: Fields of config.json that may have the length of the context.
_CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length")
#: A tokenizer whose model_max_length is this or more does not know the length.
_NO_LENGTH = 10**9
#: Files of the folder that `read_beside` reads.
FILES = (
    *("config.json", "genai_config.json", "generation_config.json"),
    *("tokenizer_config.json", SPECIAL_TOKENS_NAME, TOKENIZER_NAME, CHAT_TEMPLATE_NAME),
)


@dataclass(frozen=True, slots=True)
class Beside:
    """The context and the texts of a model of ONNX blocks, from the files beside these."""

    texts: Texts
    max_position: int
    """Length of the context in positions."""
    lacking: tuple[str, ...]
    """One line for people about each thing that no file says, and what is served instead."""


def read_beside(folder: Path, *, vocabulary: int, max_position: int | None = None, rows: int | None = None) -> Beside:
    """Reads config.json, or genai_config.json of onnxruntime-genai, and the files of `read_texts` in `folder`.

    `vocabulary` is the number of tokens, `max_position` the context that a user asks for. The graphs have tables for
    `rows` positions (None: for any number). Raises UsageError that names the file and field that is wrong, or a
    `max_position` beyond the model's context.
    """
    config = optional_json(folder / "config.json")
    genai = optional_json(folder / "genai_config.json")
    model = genai.nested("model") if genai.has("model") else Fields({}, "genai_config.json", UsageError)
    eos_ids = token_ids(config, "eos_token_id") or token_ids(model, "eos_token_id")
    bos_id = first_id(config, "bos_token_id")
    bos_id = first_id(model, "bos_token_id") if bos_id is None else bos_id
    texts = read_texts(folder, vocab_size=vocabulary, eos_ids=eos_ids, bos_id=bos_id)
    declared = _first(config, _CONTEXTS) or _first(model, ("context_length",))
    declared = declared or _first(optional_json(folder / "tokenizer_config.json"), ("model_max_length",))
    longest = min(declared or rows or _NO_LENGTH, rows or _NO_LENGTH)
    if max_position is not None and max_position > longest:
        raise UsageError(f"--max-position {max_position} is beyond the model's context of {longest}")
    context = (
        f"no config.json or genai_config.json says how long a context is: {DEFAULT_CONTEXT} positions "
        "(--max-position N says it)"
    )
    lacking = (*(() if declared or max_position else (context,)), *texts.notes)
    return Beside(texts, max_position or min(declared or DEFAULT_CONTEXT, longest), lacking)


def _first(fields: Fields, names: Sequence[str]) -> int | None:
    """Returns the first usable length among the fields `names`; None if there is none.

    Models for more than text have these fields in `text_config`.
    """
    if fields.has("text_config"):
        return _first(fields.nested("text_config"), names)
    for name in names:
        if fields.has(name) and 0 < (length := int(fields.number(name))) < _NO_LENGTH:
            return length
    return None
