"""Nothing about our users leaves the machine by way of ONNX Runtime."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough


def test_loading_the_worker_leaves_no_trace_of_telemetry(tmp_path: Path) -> None:
    program = "import blockrelay_worker.execution.cpu.linears, onnxruntime"
    env = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    env |= {"TMPDIR": str(tmp_path), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == [], "ONNX Runtime's telemetry keeps its session and cache here"
