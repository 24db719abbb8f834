"""`blockrelay up --blocks`: has the worker describe ONNX blocks that are to be served as they are."""

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


def warm_settings(
    sequential: bool, max_warm_sessions: int | None, memory: int | None, *, has_blocks: bool
) -> dict[str, object]:
    """The worker's settings for blocks that are run one by one. Raises UsageError for options without what they are
    of."""
    limits = {"--max-warm-sessions": max_warm_sessions, "--memory": memory}
    if not sequential:
        for option, value in limits.items():
            if value is not None:
                raise UsageError(f"{option} is for --sequential")
        return {}
    if not has_blocks:
        raise UsageError("--sequential is for --blocks: other models are cut into stages")
    settings = {"sequential": "true", "max_warm_sessions": max_warm_sessions, "warm_session_bytes": memory}
    return {name: value for name, value in settings.items() if value is not None}
