"""Reads the named special tokens of a checkpoint (bos_token, eos_token, pad_token, ...), as transformers does.

tokenizer_config.json names them. In older folders special_tokens_map.json has them too, and wins. It is not read if
tokenizer_config.json lists all added tokens (`added_tokens_decoder`).
"""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import UsageError

_ENDS = ("bos_token", "eos_token")


def special_tokens(settings: Fields, older: Fields) -> dict[str, str]:
    """Returns the text of each special token by its name.

    `settings` is tokenizer_config.json, `older` special_tokens_map.json. Raises UsageError for a bos_token or eos_token
    that is no text.
    """
    sources = [("tokenizer_config.json", settings)]
    if "added_tokens_decoder" not in set(settings.names()):
        sources.append(("special_tokens_map.json", older))
    tokens: dict[str, str] = {}
    for file, fields in sources:
        for name in fields.names():
            if not name.endswith("_token"):
                continue
            value: Any = fields.take(name)
            text = _text(value)
            if text is not None:
                tokens[name] = text
            elif value is None:
                tokens.pop(name, None)
            elif name in _ENDS:
                raise UsageError(f"{file}: {name} must be a string: {json.dumps(value)}")
        extra: Any = fields.take("extra_special_tokens") if fields.has("extra_special_tokens") else None
        for name, value in cast(dict[str, object], extra).items() if isinstance(extra, dict) else ():
            if (text := _text(value)) is not None:
                tokens[name] = text
    return tokens


def named_tokens(tokens: Mapping[str, str], template: str) -> tuple[tuple[str, str], ...]:
    """Returns name and text of the special `tokens` that a chat template names, without bos_token and eos_token.

    Others are left out: a model's hash covers only what its answers depend on.
    """
    return tuple(
        (name, tokens[name])
        for name in sorted(tokens)
        if name not in _ENDS and re.search(rf"\b{re.escape(name)}\b", template)
    )


def _text(value: object) -> str | None:
    """Returns the text of a token that is a string or an object with a "content"; None for anything else."""
    if isinstance(value, dict):
        value = cast(dict[str, object], value).get("content")
    return value if isinstance(value, str) else None
