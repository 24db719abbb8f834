"""A checkpoint in which one token makes one block overflow, and that computes as usual for all others."""

from pathlib import Path

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay_converter.convert import convert
from tests.support.models.checkpoints import write_checkpoint, write_safetensors
from tests.support.models.planted_outliers import read_float32

#: The token whose rows overflow, which no known answer has.
OVERFLOWING = 499


def plant_overflow(path: Path, *, layer: int, token: int = OVERFLOWING) -> None:
    """Rewrite the float32 checkpoint at `path`: the first channel belongs to `token` alone, and is more than a float
    holds behind the second norm of `layer`, counted from 0. No weight of a product reads or writes it."""
    tensors = read_float32(path)
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 0
    embedding[token, 0] = 100
    for name, values in tensors.items():
        if name.endswith("norm.weight"):
            values[0] = 1e38 if name == f"model.layers.{layer}.post_attention_layernorm.weight" else 0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            values[0] = 0
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            values[:, 0] = 0
    write_safetensors(path / "model.safetensors", {name: ("float32", values) for name, values in tensors.items()})


def overflowing_model(root: Path, precision: str, *, block: int) -> BlockFolder:
    """The tiny model, four layers and the head, whose `block` overflows for that token."""
    write_checkpoint(root / "checkpoint", seed=3)
    plant_overflow(root / "checkpoint", layer=block - 1)

    def report(what: str, done: int, total: int) -> None:
        """Nobody watches."""

    convert(root / "checkpoint", root / "folder", precision=precision, report=report, name="tiny")
    return open_block_folder(root / "folder")
