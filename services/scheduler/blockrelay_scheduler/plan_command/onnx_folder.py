"""`blockrelay plan --blocks`: has the worker describe ONNX blocks that others made, since services do not import each
other."""

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
    """The block folder to plan for: `model`, or the one in the cache that describes the ONNX blocks in `blocks`; the
    bundled one where neither is given.

    Raises UsageError where both are, and typer.Exit where the worker has said on stderr what is wrong.
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
