"""ONNX blocks as a service opens them: described in a cache of the test's own."""

import contextlib
import io
from pathlib import Path

import pytest

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.onnx_blocks.reports.codec import decode
from blockrelay.onnx_blocks.reports.describing import Described
from blockrelay_worker.offline.onnx_blocks.describe import run


def described(folder: Path, cache: Path, *options: str) -> Path:
    """The folder that services open for the blocks in `folder`."""
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told):
        patch.setenv("BLOCKRELAY_CACHE_DIR", str(cache))
        assert run([*options, "--", str(folder)]) == 0
    return Path(decode(Described, told.getvalue().encode()).folder)


def opened(folder: Path, cache: Path, *options: str) -> BlockFolder:
    return open_block_folder(described(folder, cache, *options))
