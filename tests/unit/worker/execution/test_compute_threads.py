"""A CPU worker has two pools of `threads` threads, however many layers its model has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from blockrelay_converter.convert import convert
from tests.support.models.checkpoints import write_checkpoint

pytestmark = pytest.mark.thorough

THREADS = 4
#: The kernels' pool and the one that all sessions of ONNX Runtime share: while one works the other sleeps. The caller's
#: thread is one of each.
POOLS = 2
CODE = """
import json, os, sys
import numpy as np
from blockrelay.block_folder.folder import open_block_folder
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.loading import load_stage
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.kernels import load_kernels

def threads():
    return len(os.listdir("/proc/self/task"))

folder, variant, count = open_block_folder(sys.argv[1]), sys.argv[2], int(sys.argv[3])
np.ones((300, 300), np.float32) @ np.ones((300, 300), np.float32)  # NumPy's own threads are there
before = threads()
given = dict(pages=64, threads=count, kernels=load_kernels(count))
if variant == "chosen":
    stage = load_stage(folder, 1, folder.model.blocks, **given)
else:
    stage = StageExecutor(folder, 1, folder.model.blocks, **given, backend=variant)
for rows in (1, 200):
    segment = Segment(rows=rows, first_position=0, pages=list(range(13)))
    stage.run(Batch(segments=[segment], tokens=np.zeros(rows, np.int32), wanted=[rows - 1]))
print(json.dumps({"products": stage.backend, "started": threads() - before}))
"""


@pytest.fixture(scope="module", params=["w8a8", "fp32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of many layers."""
    path = tmp_path_factory.mktemp("layers")
    write_checkpoint(path / "checkpoint", seed=3, num_hidden_layers=24, hidden_size=128, vocab_size=40960)
    convert(path / "checkpoint", path / "model", precision=request.param, report=lambda *_: None)
    return path / "model"


@pytest.mark.skipif(sys.platform != "linux", reason="counts /proc/self/task")
def test_a_model_of_many_layers_starts_no_more_threads_than_one_of_few(model: Path) -> None:
    for products in ("chosen", "u8s8"):
        command = [sys.executable, "-c", CODE, str(model), products, str(THREADS)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        assert found["started"] <= POOLS * (THREADS - 1), found
