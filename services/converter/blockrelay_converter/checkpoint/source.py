"""Reads and checks the JSON files of a checkpoint folder, before any weight is read."""

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from blockrelay.block_folder.folder import refuse_onnx_blocks
from blockrelay.block_folder.hub_cache import HUB_NAME, model_name
from blockrelay.block_folder.lfs_pointer import refuse_lfs_pointer
from blockrelay.block_folder.model import ModelConfig
from blockrelay.errors import UsageError
from blockrelay.text.text_assets import TO_TOKENIZER_JSON, Texts, other_tokenizer, read_texts
from blockrelay_converter.checkpoint.config import SourceConfig, read_config
from blockrelay_converter.checkpoint.other_folders import ADAPTER_NAME, refuse_other_folders

_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """A checkpoint whose JSON files describe a model that can be converted."""

    config: SourceConfig
    texts: Texts
    """The tokenizer, the chat template and the defaults of generation."""
    model: ModelConfig
    """The model of `config`, with its name for clients and what `texts` adds."""
    notes: tuple[str, ...]
    """Lines for the user: one for each thing that is lacking, not applied, or may surprise."""


def read_source(checkpoint: Path, *, name: str | None = None, max_position: int | None = None) -> CheckpointSource:
    """Reads the JSON files of a checkpoint.

    `name` is the model's name for clients. The default is organisation/name for a snapshot in Hugging Face's cache,
    `original_name` for a mount point, else the folder's name. `max_position` shortens the context to that many tokens.
    Raises UnsupportedModel, UsageError or BlockFolderError that names the file and field.
    """
    refuse_onnx_blocks(checkpoint)
    refuse_other_folders(checkpoint)
    if (other := other_tokenizer(checkpoint)) is not None:
        raise UsageError(
            f"{checkpoint} has {other} and no tokenizer.json, which alone is read: {TO_TOKENIZER_JSON}; "
            f"without {other} the model takes and gives token ids"
        )
    refuse_lfs_pointer(checkpoint / "config.json")
    content = (checkpoint / "config.json").read_bytes()
    config = read_config(content, max_position=max_position)
    unnamed = name is None and os.path.ismount(checkpoint)
    name = name or (unnamed and original_name(content)) or model_name(checkpoint)
    model = config.model
    texts = read_texts(checkpoint, vocab_size=model.vocab_size, eos_ids=model.eos_ids, bos_id=model.bos_id)
    model = texts.added_to(replace(model, name=name))
    notes = [*texts.notes]
    if unnamed:
        notes.append(f"clients call the model {name}: its folder is where something was mounted; --name names it")
    if (checkpoint / ADAPTER_NAME).exists():
        notes.append(f"{ADAPTER_NAME}: the adapter is not applied, the model is converted without it")
    return CheckpointSource(config=config, texts=texts, model=model, notes=tuple(notes))


def original_name(config: bytes) -> str:
    """Returns the name of the checkpoint from its valid config.json, or an empty string if it has none.

    The name is organisation/name of a hub, or the last part of a path. It is needed in containers, where the folder has
    the name of its mount point.
    """
    named = json.loads(config).get("_name_or_path")
    if not isinstance(named, str) or not _NAME.fullmatch(named.rpartition("/")[2]):
        return ""
    return named if HUB_NAME.fullmatch(named) else named.rpartition("/")[2]
