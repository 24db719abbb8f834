"""Figures of a device arrive with the answers of its process."""

from collections.abc import Iterator

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.host.memory import allowed_bytes
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.onnx.graphs.stage import weight_shapes
from blockrelay_worker.execution.onnx.known_answers import PAGES_NEEDED
from blockrelay_worker.execution.process.care import DeviceCare
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from tests.support.worker.devices import device_metrics

ROWS = 20


@pytest.fixture
def executors(fp32: BlockFolder) -> Iterator[DeviceExecutors]:
    made = DeviceExecutors(fp32, Gpu("cpu", 5.0))
    yield made
    made.close()


def test_weights_and_pages_are_known_from_the_load_on(executors: DeviceExecutors, fp32: BlockFolder) -> None:
    stage, told, model = executors.load(fp32, 1, 5, pages=12), device_metrics(), fp32.model
    DeviceCare(stage, told.group, canary_every_s=1e9)
    numbers = sum(int(np.prod(shape)) for block in range(1, 6) for shape in weight_shapes(model, block).values())
    rotation = 2 * model.max_position * model.head_dim // 2
    assert told.value("device_weight_bytes") == 4 * (numbers + rotation)
    page = 16 * model.kv_heads * model.head_dim * 4 * 2 * model.layers
    assert told.value("device_pool_bytes") == (12 + PAGES_NEEDED) * page
    assert 10e6 < told.value("device_process_bytes") < 4e9
    assert 0 < told.value("device_memory_used_bytes") < told.value("device_memory_bytes") == allowed_bytes()
    executors.close()
    assert told.value("device_weight_bytes") == told.value("device_process_bytes") == 0, "nothing is there now"


def test_each_step_counts_what_went_up_and_came_down(executors: DeviceExecutors, fp32: BlockFolder) -> None:
    stage, told = executors.load(fp32, 1, 5, pages=8), device_metrics()
    care = DeviceCare(stage, told.group, canary_every_s=1e9)
    assert told.value("device_bus_bytes", direction="up") == told.value("device_bus_bytes", direction="down") == 0
    batch = Batch(
        segments=[Segment(rows=ROWS, first_position=0, pages=(0, 1))],
        tokens=np.arange(5, 5 + ROWS, dtype=np.int32),
        wanted=[ROWS - 1],
    )
    moved: list[tuple[float, float]] = []
    for _ in range(3):
        stage.run(batch)
        care.between_steps()
        moved.append((told.value("device_bus_bytes", direction="up"), told.value("device_bus_bytes", direction="down")))
    each_up, each_down = moved[0]
    assert each_down == 4 * (ROWS + fp32.model.vocab_size), "of every row a sum, of one its logits"
    assert each_up > 4 * ROWS, "tokens, and where they are"
    assert moved == [(number * each_up, number * each_down) for number in (1, 2, 3)]
