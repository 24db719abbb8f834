"""Reads the files about text beside a model's weights: tokenizer, special tokens, chat templates and
generation_config.json."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer as LibraryTokenizer

from blockrelay.block_folder.lfs_pointer import refuse_lfs_pointer
from blockrelay.block_folder.manifest import CHAT_TEMPLATE_NAME, TOKENIZER_NAME, GenerationDefaults
from blockrelay.block_folder.model import ModelConfig
from blockrelay.block_folder.strict_json import Fields
from blockrelay.errors import BlockFolderError, UsageError
from blockrelay.text.generation_config import generation_defaults, ignored_defaults, ignored_line
from blockrelay.text.special_tokens import named_tokens, special_tokens
from blockrelay.text.tokenizer import Tokenizer

#: The folder beside chat_template.jinja for templates with other names.
_MORE_TEMPLATES = "additional_chat_templates"
SPECIAL_TOKENS_NAME = "special_tokens_map.json"
#: Files of tokenizers that we do not read: sentencepiece, GPT-2's, BERT's, tiktoken's.
_OTHER_TOKENIZERS = ("tokenizer.model*", "*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")
#: The end of a message about such a file: how to make a tokenizer.json.
TO_TOKENIZER_JSON = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers makes tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The files and settings about text of a checkpoint. None for those that it does not have."""

    tokenizer: bytes | None
    """The content of tokenizer.json."""
    chat_template: str | None
    """The Jinja text of the template for chats."""
    bos_token: str | None
    eos_token: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    generation: GenerationDefaults
    ignored_defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of generation_config.json that are not applied, as in `Manifest.ignored_defaults`."""
    notes: tuple[str, ...] = ()
    """One line for people about each thing that is missing, or not as a user might expect."""
    special_tokens: tuple[tuple[str, str], ...] = ()
    """Further special tokens that the chat template names, as in `ModelConfig.special_tokens`."""

    def files(self) -> dict[str, bytes]:
        """Returns the files about text that a block folder has, by their names."""
        template = None if self.chat_template is None else self.chat_template.encode()
        files = {TOKENIZER_NAME: self.tokenizer, CHAT_TEMPLATE_NAME: template}
        return {name: content for name, content in files.items() if content is not None}

    def added_to(self, model: ModelConfig) -> ModelConfig:
        """Returns `model` with the tokens that begin and end its texts, and those that its chat template names."""
        return replace(
            model,
            eos_ids=self.eos_ids,
            bos_id=self.bos_id,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            special_tokens=self.special_tokens,
        )


def read_texts(folder: Path, *, vocab_size: int, eos_ids: tuple[int, ...] | None, bos_id: int | None) -> Texts:
    """Reads the files about text in `folder`, of a model of `vocab_size` tokens.

    `eos_ids` and `bos_id` are those of its config.json; None if it has none. Raises UsageError that names the file and
    field that is wrong, or that a service would refuse.
    """
    settings = optional_json(folder / "tokenizer_config.json")
    generation = optional_json(folder / "generation_config.json")
    definition = _tokenizer(folder / TOKENIZER_NAME, vocab_size)
    tokenizer = None if definition is None else _opened(definition)
    named = special_tokens(settings, optional_json(folder / SPECIAL_TOKENS_NAME))
    eos_token = named.get("eos_token")
    # generation_config.json has what the model's author generates with; config.json counts only without it.
    eos_ids = token_ids(generation, "eos_token_id") or eos_ids or ()
    generated = first_id(generation, "bos_token_id")
    bos_id = bos_id if generated is None else generated
    for name, ids in (("eos_token_id", eos_ids), ("bos_token_id", () if bos_id is None else (bos_id,))):
        for token in ids:
            if token >= vocab_size:
                raise UsageError(f"{name} {token} is outside the vocabulary of {vocab_size}")
    ignored = ignored_defaults(generation)
    notes = [ignored_line(ignored)] if ignored else []
    # The tokenizer's eos_token ends chats, whatever the other files say.
    ends = None if tokenizer is None or eos_token is None else tokenizer.token_id(eos_token)
    if ends is not None and ends < vocab_size:
        if not eos_ids:
            notes.append(f"no eos_token_id: answers end at {eos_token} ({ends}), the tokenizer's eos_token")
        eos_ids = tuple(dict.fromkeys((*eos_ids, ends)))
    notes += [] if tokenizer is None else _beyond(tokenizer, vocab_size)
    templates = _chat_templates(folder, settings)
    chat_template = _checked_template(folder, templates.pop("default", None))
    notes += [f"not applied: chat templates named {', '.join(sorted(templates))}"] if templates else []
    return Texts(
        tokenizer=definition,
        chat_template=chat_template,
        bos_token=named.get("bos_token"),
        eos_token=eos_token,
        special_tokens=named_tokens(named, chat_template or ""),
        bos_id=bos_id,
        eos_ids=eos_ids,
        generation=generation_defaults(generation),
        ignored_defaults=ignored,
        notes=(*_lacking(folder, definition, chat_template, eos_ids), *notes),
    )


def other_tokenizer(folder: Path) -> str | None:
    """Returns the name of a tokenizer's file that we do not read; None if there is none, or a tokenizer.json too."""
    if (folder / TOKENIZER_NAME).is_file():
        return None
    names = (path.name for pattern in _OTHER_TOKENIZERS for path in sorted(folder.glob(pattern)))
    return next(names, None)


def _lacking(folder: Path, tokenizer: bytes | None, chat_template: str | None, eos_ids: Sequence[int]) -> list[str]:
    notes: list[str] = []
    if tokenizer is None:
        other = other_tokenizer(folder)
        unread = f" ({other} is not read: {TO_TOKENIZER_JSON})" if other else ""
        notes.append(f"no tokenizer.json{unread}: prompts are token ids, and answers too")
    elif chat_template is None:
        notes.append("no chat template (chat_template.jinja, or tokenizer_config.json): chats are refused")
    if not eos_ids:
        notes.append(
            "no end tokens (eos_token_id in generation_config.json, config.json or genai_config.json): every answer "
            "has max_tokens tokens"
        )
    return notes


def token_ids(raw: Fields, name: str) -> tuple[int, ...] | None:
    """Reads a field that is a token id or a list of them, without repetitions; None if it is absent or null.

    Raises the error of `raw` (`Fields`) for anything else.
    """
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
    """Reads the first token id of a field; None if it is absent, null or empty. Raises as `token_ids` does."""
    ids = token_ids(raw, name)
    return ids[0] if ids else None


def optional_json(path: Path) -> Fields:
    """Reads the JSON object in a file; an empty one if there is no such file.

    Raises UsageError if the content is not a JSON object, or is a Git LFS pointer.
    """
    if not path.is_file():
        return Fields({}, path.name, UsageError)
    refuse_lfs_pointer(path)
    return Fields.parse(path.read_bytes(), path.name, UsageError)


def _tokenizer(path: Path, vocab_size: int) -> bytes | None:
    if not path.is_file():
        return None
    refuse_lfs_pointer(path)
    content = path.read_bytes()
    try:
        tokenizer = LibraryTokenizer.from_buffer(content)
    except Exception as problem:  # noqa: BLE001 - all that tokenizers raises for a bad file is Exception
        raise UsageError(f"{path.name} cannot be read: {' '.join(str(problem).split())}") from None
    # Fine-tunes may add a token such as [PAD] for which the model has no row, so added tokens may be beyond the
    # vocabulary. Other tokens beyond it mean that this is the tokenizer of another model.
    highest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
    if highest >= vocab_size:
        raise UsageError(f"{path.name} has token {highest}, outside the model's vocabulary of {vocab_size}")
    return content


def _beyond(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Returns a list with a line that names the added tokens beyond the model's vocabulary; empty if there are none."""
    beyond = {token: text for token, text in tokenizer.added_tokens().items() if token >= vocab_size}
    if not beyond:
        return []
    first = min(beyond)
    more = f" and {len(beyond) - 1} more" if len(beyond) > 1 else ""
    named = f"{beyond[first]} ({first}){more}"
    return [f"tokenizer.json has {named} beyond the model's vocabulary of {vocab_size}: prompts with them are refused"]


def _opened(definition: bytes) -> Tokenizer:
    """Opens a tokenizer as gateways do. Raises UsageError for one that they would refuse."""
    try:
        return Tokenizer(definition.decode())
    except BlockFolderError as error:
        raise UsageError(f"{error}; without the file the model takes and gives token ids") from error


def _checked_template(folder: Path, source: str | None) -> str | None:
    """Returns `source`. Raises UsageError if it is not Jinja; without `jinja2` only gateways find that out."""
    if source is not None and importlib.util.find_spec("jinja2") is not None:
        from blockrelay.text.template_environment import compiled, template_environment

        try:
            compiled(template_environment(), source, name=f"{folder.name}: its chat template")
        except BlockFolderError as error:
            raise UsageError(str(error)) from error
    return source


def _chat_templates(folder: Path, settings: Fields) -> dict[str, str]:
    """Reads the chat templates by their names; chats use the one named "default"."""
    named: dict[str, str] = {}
    value: Any = settings.take("chat_template") if settings.has("chat_template") else {}
    if isinstance(value, str):
        named["default"] = value
    elif isinstance(value, list):
        for item in cast(list[object], value):
            entry = Fields(item, "tokenizer_config.json: chat_template", UsageError)
            named[entry.text("name")] = entry.text("template")
    elif value != {}:
        settings.fail("chat_template must be a string or a list of named templates")
    if (own := folder / CHAT_TEMPLATE_NAME).is_file():
        named = {path.stem: _text_of(path) for path in sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))}
        named["default"] = _text_of(own)
    return named


def _text_of(path: Path) -> str:
    """Reads the text of a file. Raises UsageError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 (byte {error.start})") from error
