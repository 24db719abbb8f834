"""A model with a wide vocabulary, whose answers are large and cost nothing, for tests."""

from pathlib import Path

from blockrelay_converter.convert import convert
from tests.support.models.checkpoints import write_checkpoint


def write_wide_model(place: Path, vocabulary: int) -> Path:
    """Write a block folder of one layer with so many tokens below `place`; its path."""
    checkpoint = write_checkpoint(
        place / "hf", seed=1, hidden_size=32, num_hidden_layers=1, intermediate_size=32, vocab_size=vocabulary
    )
    convert(checkpoint, place / "blocks", precision="fp32", report=lambda *_: None, name="tiny", answers=False)
    return place / "blocks"
