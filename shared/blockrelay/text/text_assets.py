"""Everything that the files beside a model's weights say about text: tokenizer, special tokens, chat template,
generation_config.json."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from blockrelay.block_folder.manifest import GenerationDefaults
from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import BlockFolderError, UsageError
from blockrelay.text.special_tokens import named_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What a checkpoint says about text. None where it says nothing."""

    tokenizer: bytes | None
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    generation: GenerationDefaults
    special_tokens: tuple[tuple[str, str], ...] = ()


def read_texts(folder: Path, *, vocab_size: int, eos_ids: tuple[int, ...] | None, bos_id: int | None) -> Texts:
    """Read the text files of a model of `vocab_size` tokens. `eos_ids` and `bos_id` are what its config.json says,
    where it says something. UsageError names the file and field that is wrong."""
    settings = optional_json(folder / "tokenizer_config.json")
    generation = optional_json(folder / "generation_config.json")
    # generation_config.json is what its author generates with; config.json speaks only where it is silent.
    eos_ids = token_ids(generation, "eos_token_id") or eos_ids or ()
    generated = first_id(generation, "bos_token_id")
    bos_id = bos_id if generated is None else generated
    for name, ids in (("eos_token_id", eos_ids), ("bos_token_id", () if bos_id is None else (bos_id,))):
        for token in ids:
            if token >= vocab_size:
                raise UsageError(f"{name} {token} is outside the vocabulary of {vocab_size}")
    template = _checked_template(folder, _chat_template(folder, settings))
    return Texts(
        tokenizer=_tokenizer(folder / "tokenizer.json", vocab_size),
        chat_template=template,
        bos_token=_special_token(settings, "bos_token"),
        eos_token=_special_token(settings, "eos_token"),
        special_tokens=named_tokens(settings, optional_json(folder / "special_tokens_map.json"), template or ""),
        bos_id=bos_id,
        eos_ids=eos_ids,
        generation=_generation_defaults(generation),
    )


def token_ids(raw: Fields, name: str) -> tuple[int, ...] | None:
    """A token id field: one id, a list of them, or None where it is absent or null."""
    if not raw.has(name):
        return None
    value = raw.take(name)
    values = cast(list[object], value) if isinstance(value, list) else [value]
    ids: list[int] = []
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raw.fail(f"{name} must be a token id or a list of token ids")
        ids.append(item)
    return tuple(dict.fromkeys(ids))


def first_id(raw: Fields, name: str) -> int | None:
    """The first of a token id field, or None."""
    ids = token_ids(raw, name)
    return ids[0] if ids else None


def optional_json(path: Path) -> Fields:
    """The object in a file, an empty one where there is no such file. Raises UsageError."""
    if not path.is_file():
        return Fields({}, path.name, UsageError)
    return Fields.parse(path.read_bytes(), path.name, UsageError)


def _tokenizer(path: Path, vocab_size: int) -> bytes | None:
    if not path.is_file():
        return None
    content = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as problem:  # noqa: BLE001 - all that tokenizers raises for a bad file is Exception
        raise UsageError(f"{path.name} cannot be read: {' '.join(str(problem).split())}") from None
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= vocab_size:
        raise UsageError(f"{path.name} has token {highest}, outside the model's vocabulary of {vocab_size}")
    return content


def _checked_template(folder: Path, source: str | None) -> str | None:
    """As it is. Raises UsageError for what is not Jinja, where Jinja is installed: else gateways find out."""
    if source is not None and importlib.util.find_spec("jinja2") is not None:
        from blockrelay.text.template_environment import compiled, template_environment

        try:
            compiled(template_environment(), source, name=f"{folder.name}: its chat template")
        except BlockFolderError as error:
            raise UsageError(str(error)) from error
    return source


def _chat_template(folder: Path, settings: Fields) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if not settings.has("chat_template"):
        return None
    given: Any = settings.take("chat_template")
    if isinstance(given, str):
        return given
    if isinstance(given, list):  # several named templates: the one named "default"
        for item in cast(list[object], given):
            entry = Fields(item, "tokenizer_config.json: chat_template", UsageError)
            if entry.text("name") == "default":
                return entry.text("template")
        return None
    settings.fail("chat_template must be a string or a list of named templates")


def _special_token(settings: Fields, name: str) -> str | None:
    if not settings.has(name):
        return None
    given: Any = settings.take(name)
    if isinstance(given, dict):
        return Fields(cast(object, given), f"tokenizer_config.json: {name}", UsageError).text("content")
    if not isinstance(given, str):
        settings.fail(f"{name} must be a string: {json.dumps(given)}")
    return given


def _generation_defaults(generation: Fields) -> GenerationDefaults:
    def number(name: str) -> float | None:
        return generation.number(name) if generation.has(name) else None

    greedy = generation.has("do_sample") and not generation.flag("do_sample")
    defaults = GenerationDefaults(
        temperature=number("temperature"),
        top_k=generation.integer("top_k") if generation.has("top_k") else None,
        top_p=number("top_p"),
        min_p=number("min_p"),
        max_tokens=generation.integer("max_new_tokens", minimum=1) if generation.has("max_new_tokens") else None,
    )
    return GenerationDefaults(temperature=0.0, max_tokens=defaults.max_tokens) if greedy else defaults
