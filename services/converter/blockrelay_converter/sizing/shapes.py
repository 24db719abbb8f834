"""Reads the shape of a model to size: a block folder, a Hugging Face folder with a config.json, or a known name."""

from collections.abc import Mapping
from pathlib import Path

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.block_folder.manifest import MANIFEST_NAME
from blockrelay.block_folder.model import ModelConfig, Precision
from blockrelay.errors import UsageError
from blockrelay_converter.checkpoint.source import read_source

_LLAMA_3 = {
    "family": "llama", "heads": 32, "kv_heads": 8, "vocab_size": 128_256, "max_position": 131_072,
    "rms_norm_eps": 1e-5, "qkv_bias": False, "qk_norm": False,
}  # fmt: skip


def _llama(name: str, **sizes: int) -> ModelConfig:
    fields: dict[str, object] = {"name": name, **_LLAMA_3, **sizes}
    return ModelConfig(**fields)  # pyright: ignore[reportArgumentType]


#: Shapes by name, from the config.json files of these models.
SHAPES: Mapping[str, ModelConfig] = {
    "1b": _llama("Llama 3.2 1B", hidden_size=2048, layers=16, head_dim=64, intermediate_size=8192),
    "8b": _llama("Llama 3.1 8B", hidden_size=4096, layers=32, head_dim=128, intermediate_size=14_336),
    "70b": _llama("Llama 3.1 70B", hidden_size=8192, layers=80, heads=64, head_dim=128, intermediate_size=28_672),
}
NAMES = ", ".join(SHAPES)


def read_shape(model: str) -> tuple[ModelConfig, tuple[Precision, ...] | None]:
    """Returns the shape of `model`, and the precision of each block if that is a block folder (else None).

    `model` is the path of a folder, or a key of SHAPES; a folder wins over a shape of the same name. Raises UsageError,
    UnsupportedModel or BlockFolderError if it is neither, or a folder that cannot be served or converted.
    """
    folder = Path(model)
    if model in SHAPES and not folder.exists():
        return SHAPES[model], None
    if not folder.exists():
        raise UsageError(f"{model}: neither a folder nor one of the shapes {NAMES}")
    if (folder / MANIFEST_NAME).exists():
        opened = open_block_folder(folder, blocks=[])
        return opened.model, opened.manifest.precisions
    return read_source(folder).model, None
