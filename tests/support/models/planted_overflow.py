"""A checkpoint in which one token makes one block overflow, and that computes as usual for all others."""

from pathlib import Path

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay_converter.convert import convert
from tests.support.models.checkpoints import write_checkpoint, write_safetensors
from tests.support.models.planted_outliers import read_float32

#: The token whose rows overflow, which no known answer has.
OVERFLOWING = 499


#: Weights of a norm that make the only channel of a row more than a float32, and more than a float16 holds.
IN_FLOAT32, IN_FLOAT16 = 1e38, 1.5e4


def plant_overflow(path: Path, *, layer: int, token: int = OVERFLOWING, weight: float = IN_FLOAT32) -> None:
    """Rewrite the float32 checkpoint at `path`: the first channel belongs to `token` alone, and is more than a float
    holds behind the second norm of `layer`, counted from 0, whose `weight` there says of which type. No weight of a
    product reads or writes it."""
    tensors = read_float32(path)
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 0
    embedding[token, 0] = 100
    for name, values in tensors.items():
        if name.endswith("norm.weight"):
            values[0] = weight if name == f"model.layers.{layer}.post_attention_layernorm.weight" else 0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            values[0] = 0
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            values[:, 0] = 0
    write_safetensors(path / "model.safetensors", {name: ("float32", values) for name, values in tensors.items()})


def overflowing_model(root: Path, precision: str, *, block: int, weight: float = IN_FLOAT32) -> BlockFolder:
    """The tiny model, four layers and the head, whose `block` overflows for that token. `weight` as of
    `plant_overflow`. It has the checkpoint's own basis: a rotation spreads what was planted over all channels."""
    write_checkpoint(root / "checkpoint", seed=3)
    plant_overflow(root / "checkpoint", layer=block - 1, weight=weight)

    def report(what: str, done: int, total: int) -> None:
        """Nobody watches."""

    convert(root / "checkpoint", root / "folder", precision=precision, report=report, name="tiny", basis="original")
    return open_block_folder(root / "folder")
