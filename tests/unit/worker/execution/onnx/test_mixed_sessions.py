"""Sessions of graphs that others made: nodes without a kernel on the device run on the CPU, and are counted."""

from pathlib import Path

import numpy as np
import pytest

from blockrelay.onnx_blocks.dimensions import StepSizes
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, nodes_by_provider
from blockrelay_worker.offline.onnx_blocks.folder import open_onnx_folder
from blockrelay_worker.offline.onnx_blocks.trial import check_blocks
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer and the head, weights beside them."""
    return write_reference_blocks(tmp_path_factory.mktemp("onnx") / "blocks", ReferenceModel(layers=1), external=True)


@pytest.mark.thorough
def test_a_session_of_a_file_finds_the_weights_beside_it(blocks: Path) -> None:
    session = CpuProvider().mixed_session((blocks / "block_2.onnx").read_bytes(), blocks)
    (logits,) = session.run(None, {"/model/layers.0/Add_1_output_0": np.ones((2, 3, 64), np.float16)})
    assert np.asarray(logits).shape == (2, 3, 512) and np.isfinite(np.asarray(logits)).all()
    where = nodes_by_provider(session)
    assert where.keys() == {"CPUExecutionProvider"} and where["CPUExecutionProvider"] > 0


@pytest.mark.software_gpu
@pytest.mark.float16
def test_blocks_of_others_pass_on_a_device(blocks: Path) -> None:
    first, head = check_blocks(open_onnx_folder(blocks), open_provider("webgpu:0"), StepSizes(batch=5, new=10, past=0))
    assert (first.problem, head.problem) == ("", "")
    assert first.nodes and first.nodes_on_cpu and first.nodes_on_cpu < first.nodes, "lengths are integers, on the CPU"
    assert head.nodes and head.nodes_on_cpu == 0
