"""The named special tokens of a checkpoint (bos_token, eos_token, pad_token, ...), as transformers reads them.

tokenizer_config.json names them. Older folders have them in special_tokens_map.json, which wins over it, unless
tokenizer_config.json lists all added tokens (`added_tokens_decoder`): then the map is not read any more.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import UsageError

_ENDS = ("bos_token", "eos_token")


def special_tokens(settings: Fields, older: Fields) -> dict[str, str]:
    """Name -> text of each special token; `settings` is tokenizer_config.json, `older` special_tokens_map.json.

    UsageError for a bos_token or eos_token that is no text.
    """
    sources = [("tokenizer_config.json", settings)]
    if "added_tokens_decoder" not in set(settings.names()):
        sources.append(("special_tokens_map.json", older))
    found: dict[str, str] = {}
    for file, fields in sources:
        for name in fields.names():
            if not name.endswith("_token"):
                continue
            given: Any = fields.take(name)
            text = _text(given)
            if text is not None:
                found[name] = text
            elif given is None:
                found.pop(name, None)
            elif name in _ENDS:
                raise UsageError(f"{file}: {name} must be a string: {json.dumps(given)}")
        extra: Any = fields.take("extra_special_tokens") if fields.has("extra_special_tokens") else None
        for name, value in cast(dict[str, object], extra).items() if isinstance(extra, dict) else ():
            if (text := _text(value)) is not None:
                found[name] = text
    return found


def named_tokens(found: Mapping[str, str], template: str) -> tuple[tuple[str, str], ...]:
    """Name and text of each of the special tokens `found` that the chat template names, bos_token and eos_token aside.

    What the template does not name is left out: a model's hash covers what its answers depend on.
    """
    return tuple(
        (name, found[name])
        for name in sorted(found)
        if name not in _ENDS and re.search(rf"\b{re.escape(name)}\b", template)
    )


def _text(given: object) -> str | None:
    """The token itself, or the one that an object describes ("content")."""
    if isinstance(given, dict):
        given = cast(dict[str, object], given).get("content")
    return given if isinstance(given, str) else None
