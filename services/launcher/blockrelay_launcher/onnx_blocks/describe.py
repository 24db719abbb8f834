"""Has the worker describe ONNX blocks that are to be served as they are."""

import sys
from pathlib import Path

import typer

from blockrelay.errors import UsageError
from blockrelay.onnx_blocks.report import decode_described
from blockrelay_launcher.onnx_blocks.worker import code_of_silence, worker

_MODULE = "blockrelay_worker.offline.onnx_blocks.describe"


def described_blocks(folder: Path, *, max_position: int | None) -> Path:
    """The folder that services serve the blocks of `folder` from; stderr has a line for what no file there says.

    Raises UsageError where there is none to describe, and typer.Exit where the worker has said why.
    """
    if not folder.is_dir():
        raise UsageError(f"--blocks {folder}: there is no such folder")
    argv = [sys.executable, "-P", "-m", _MODULE]
    argv += [] if max_position is None else ["--max-position", str(max_position)]
    with worker([*argv, "--", str(folder)]) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        code = process.wait()
    if code or not line:
        raise typer.Exit(code_of_silence(code))
    described = decode_described(line)
    for lacking in described.lacking:
        sys.stderr.write(f"{folder}: {lacking}\n")
    return Path(described.folder)
