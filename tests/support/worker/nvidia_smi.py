"""An `nvidia-smi` that tells of two GPUs, one of which shares its memory with the host."""

import os
from pathlib import Path

import pytest

_PROGRAM = """#!/bin/sh
echo "0, GPU-aa11, NVIDIA H200, 143771, 100000, 580.95.05"
echo "1, GPU-bb22, NVIDIA GB10, [N/A], [N/A], 580.95.05"
"""


def install_smi(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put it before what PATH has."""
    program = folder / "nvidia-smi"
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
