"""The native kernels under AddressSanitizer, UBSan and ThreadSanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.project import ROOT

SCRIPT = ROOT / "services/worker/native/sanitize.sh"


@pytest.mark.sanitizer
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_kernels_touch_only_their_buffers_and_do_nothing_undefined(tmp_path: Path) -> None:
    done = subprocess.run([str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "baseline-address: " in done.stdout and "baseline-thread: " in done.stdout
    if all(map(shutil.which, ("qemu-aarch64", "aarch64-linux-gnu-g++"))):
        assert all(f"{name}-emulated: " in done.stdout for name in ("neon", "dotprod", "i8mm"))
