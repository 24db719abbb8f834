"""The models of `make bench`: checkpoints of random weights, a public model, and block folders made of them."""

import sys
from pathlib import Path

from bench.quality.checkpoint import write_checkpoint as write_real_checkpoint
from bench.quality.gguf_model import read
from bench.quality.model_file import gguf_file
from bench.runs import BLOCKRELAY, WORK, run, say
from bench.units import REAL

MODELS = WORK / "models"


def checkpoint(shape: str) -> Path:
    """Returns the checkpoint of this shape, and makes it if it is not there. Raises Failed and UsageError."""
    path = MODELS / shape
    if not path.exists():
        say(f"making checkpoint {shape}")
        if shape == REAL:
            MODELS.mkdir(parents=True, exist_ok=True)
            write_real_checkpoint(read(gguf_file()), path)
            return path
        run([sys.executable, "-m", "bench.checkpoint", shape, str(path)], log=WORK / "checkpoint.log", capture=False)
    return path


def block_folder(shape: str, precision: str) -> Path:
    """Returns the block folder of this shape and precision, and converts it if it is not there.

    Raises Failed and UsageError.
    """
    path = MODELS / f"{shape}-{precision}"
    if not path.exists():
        source = checkpoint(shape)
        say(f"converting {shape} to {precision}")
        draft = path.with_name(path.name + ".draft")
        command = [str(BLOCKRELAY), "convert", str(source), str(draft), "--precision", precision]
        run(command, log=WORK / "convert.log", capture=False)
        draft.rename(path)
    return path
