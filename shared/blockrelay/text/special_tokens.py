"""The special tokens that a chat template may name beside `bos_token` and `eos_token`, as transformers reads them."""

import re
from collections.abc import Iterator
from typing import cast

from blockrelay.block_folder.strict_json import Fields

_ENDS = ("bos_token", "eos_token")


def named_tokens(settings: Fields, special_map: Fields, template: str) -> tuple[tuple[str, str], ...]:
    """Name and spelling of each special token that `template` names, such as `pad_token`.

    `settings` is tokenizer_config.json, and `special_map` special_tokens_map.json, where older checkpoints have them.
    What the template does not name is left out: a model's hash covers what its answers depend on.
    """
    found = {**dict(_spelled(special_map)), **dict(_spelled(settings))}
    return tuple(
        (name, found[name])
        for name in sorted(found)
        if name not in _ENDS and re.search(rf"\b{re.escape(name)}\b", template)
    )


def _spelled(fields: Fields) -> Iterator[tuple[str, str]]:
    for name in fields.names():
        if name.endswith("_token") and fields.has(name):
            yield from _one(name, fields.take(name))
    if fields.has("extra_special_tokens"):
        extra = cast(object, fields.take("extra_special_tokens"))
        for name, value in cast(dict[str, object], extra).items() if isinstance(extra, dict) else ():
            yield from _one(name, value)


def _one(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Flags such as `add_bos_token` end like a token's name, and have no spelling."""
    content = cast(dict[str, object], value).get("content") if isinstance(value, dict) else value
    if isinstance(content, str):
        yield name, content
