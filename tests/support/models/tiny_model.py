"""A tiny random model as a block folder, for tests that start whole processes."""

from pathlib import Path

from blockrelay_converter.convert import convert
from tests.support.models.checkpoints import write_checkpoint

#: Four layers and the head.
BLOCKS = 5


def _report(what: str, done: int, total: int) -> None:
    """Nobody watches the progress of a test."""


def write_tiny_model(root: Path, precision: str = "w8a8", context: int = 512, *, tokenizer: bool = True) -> Path:
    """The block folder `root/model`: 64 wide, with a tokenizer and a chat template."""
    write_checkpoint(root / "checkpoint", seed=3, max_position_embeddings=context, tokenizer=tokenizer)
    convert(root / "checkpoint", root / "model", precision=precision, report=_report, name="tiny")
    return root / "model"
