"""The named special tokens of a checkpoint (bos_token, eos_token, pad_token, ...), as transformers reads them.

tokenizer_config.json names them. Older folders have them in special_tokens_map.json, which wins over it, unless
tokenizer_config.json lists all added tokens (`added_tokens_decoder`): then the map is not read any more.
"""

import json
from typing import Any, cast

from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import UsageError


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
            elif name in ("bos_token", "eos_token"):
                raise UsageError(f"{file}: {name} must be a string: {json.dumps(given)}")
    return found


def _text(given: object) -> str | None:
    """The token itself, or the one that an object describes ("content")."""
    if isinstance(given, dict):
        given = cast(dict[str, object], given).get("content")
    return given if isinstance(given, str) else None
