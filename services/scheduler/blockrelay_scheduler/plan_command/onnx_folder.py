"""`blockrelay plan --blocks`: has a child process of the worker's code describe ONNX blocks made by others.

It is a process, because services do not import each other.
"""

import subprocess
import sys
from pathlib import Path

import typer

from blockrelay.errors import UsageError
from blockrelay.exit_codes import FAILED
from blockrelay.onnx_blocks.reports.codec import decode
from blockrelay.onnx_blocks.reports.describing import Described
from blockrelay.settings import BUNDLED_MODEL

_MODULE = "blockrelay_worker.offline.onnx_blocks.describe"


def planned_model(model: Path | None, blocks: Path | None, max_position: int | None) -> Path:
    """Returns the block folder to plan for: `model`, a description of the ONNX blocks in `blocks`, or the bundled one.

    The description is a block folder in the cache. `max_position` is the context in tokens that it gets; None: the one
    that the blocks' files name, else a default. Raises UsageError where both are given, or `max_position` without
    `blocks`, and typer.Exit where the child process failed, which has written the cause to stderr.
    """
    if blocks is None:
        if max_position is not None:
            raise UsageError("--max-position is for --blocks: converting a model decides about its context")
        return model or BUNDLED_MODEL
    if model is not None:
        raise UsageError("--blocks is instead of --model: give one of them")
    argv = [sys.executable, "-P", "-m", _MODULE]
    argv += [] if max_position is None else ["--max-position", str(max_position)]
    done = subprocess.run([*argv, "--", str(blocks)], stdout=subprocess.PIPE, check=False)
    if done.returncode or not done.stdout:
        raise typer.Exit(done.returncode if done.returncode > 0 else FAILED)
    return Path(decode(Described, done.stdout.splitlines()[0]).folder)
