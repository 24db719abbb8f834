"""Stages that come and go on a device leave their weights there, for those that are composed of the same blocks."""

import time
from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.errors import KnownAnswerMismatch
from blockrelay.protocol.plan import Stage
from blockrelay_converter.convert import convert
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.onnx.loading import OnnxExecutors
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.execution.onnx.stage import OnnxStage
from blockrelay_worker.execution.process.executors import DeviceExecutors, Gpu
from tests.support.models.checkpoints import write_checkpoint

pytestmark = pytest.mark.thorough

BLOCKS = 32
PROMPT = np.arange(5, 25, dtype=np.int32)
ENOUGH = 10**9


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    """32 blocks, 256 wide, float32: 22 million weights."""
    root = tmp_path_factory.mktemp("small")
    write_checkpoint(
        root / "checkpoint",
        seed=3,
        num_hidden_layers=BLOCKS - 1,
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=512,
        tokenizer=False,
    )
    convert(root / "checkpoint", root / "model", precision="fp32", report=lambda *_: None, name="small")
    return open_block_folder(root / "model")


@pytest.fixture
def executors(small: BlockFolder) -> Iterator[DeviceExecutors]:
    made = DeviceExecutors(small, Gpu("cpu", 30.0, budget_bytes=ENOUGH))
    yield made
    made.close()


def logits(stages: list[Executor]) -> NDArray[np.float32]:
    """Of the last row of a prompt that goes through them."""
    segments = [Segment(rows=len(PROMPT), first_position=0, pages=(3, 1))]
    output = stages[0].run(Batch(segments=segments, tokens=PROMPT, wanted=[19] if len(stages) == 1 else []))
    for stage in stages[1:]:
        output = stage.run(Batch(segments=segments, hidden=output.hidden, wanted=[19] if stage.gives_logits else []))
    assert output.logits is not None
    return output.logits.copy()


def test_a_stage_is_composed_of_blocks_that_are_there(executors: DeviceExecutors, small: BlockFolder) -> None:
    parts = [executors.load(small, first, last, pages=64) for first, last in ((1, 16), (17, BLOCKS))]
    right = logits([*parts])
    for part in parts:
        part.close()
    began = time.perf_counter()
    whole = executors.load(small, 1, BLOCKS, pages=64)
    print(f"{BLOCKS} blocks whose weights are there: a stage after {time.perf_counter() - began:.3f} s")  # noqa: T201
    np.testing.assert_allclose(logits([whole]), right, rtol=0, atol=1e-5)
    for _ in range(4):
        whole.canary()


def test_weights_go_when_others_need_their_room(small: BlockFolder) -> None:
    """Those that were used longest ago first, and none that a stage uses or is about to."""
    device = OnnxExecutors(CpuProvider())
    sizes = device.memory(small)

    def load(first: int, last: int, *, room: int) -> OnnxStage:
        return device.load(small, first, last, pages=8, weight_room=room)

    def here() -> set[int]:
        return device.resident(small, 1, BLOCKS)

    for first, last in ((1, 4), (5, 8), (9, 12)):
        load(first, last, room=ENOUGH).close()
    assert here() == set(range(1, 13))
    used = load(1, 2, room=ENOUGH)
    room = sizes.weight_bytes(Stage(first=1, last=12))
    stage = load(13, 14, room=room)
    assert here() == {*range(1, 15)} - {3, 4}, "as many as are uploaded"
    load(7, 8, room=0).close()
    assert here() == {1, 2, 7, 8, 13, 14}, "without a budget what is not used stays until the next stage is loaded"
    used.close()
    stage.close()
    load(31, 32, room=0).close()
    assert here() == {31, 32}


def test_stages_that_have_blocks_in_common_have_their_weights_once(small: BlockFolder) -> None:
    device = OnnxExecutors(CpuProvider())
    one, other = (device.load(small, first, last, pages=8) for first, last in ((1, 4), (3, 6)))
    held = [{name: value.data_ptr() for name, value in stage._held.items()} for stage in (one, other)]  # pyright: ignore[reportPrivateUsage]
    common = held[0].keys() & held[1].keys()
    assert {name.partition("/")[0] for name in common} == {"block_3", "block_4", "cos", "sin"}
    assert all(held[0][name] == held[1][name] for name in common)
    one.close()
    device.load(small, 2, 2, pages=8).close()
    assert device.resident(small, 1, 6) == {2, 3, 4, 5, 6}, "the other stage has them still"


class Wrong(CpuProvider):
    """Its sessions of several blocks that are made from now on compute something else."""

    name = "wrong"
    from_now_on = False

    def session(self, graph: bytes, *, quiet: bool = False, capture: bool = False) -> ort.InferenceSession:
        if not self.from_now_on:
            return super().session(graph, quiet=quiet, capture=capture)
        model = onnx.load_from_string(graph)
        for node in model.graph.node:
            if node.output[0].endswith("/down_product") and "block_4/" in node.output[0]:
                node.input[0] = node.input[0].replace("activated", "silu")
        return super().session(model.SerializeToString(), quiet=quiet, capture=capture)


def test_a_composition_that_is_wrong_is_refused_though_its_blocks_were_right(small: BlockFolder) -> None:
    provider = Wrong()
    device = OnnxExecutors(provider)
    for first, last in ((1, 2), (3, 4)):
        device.load(small, first, last, pages=8).close()
    device.load(small, 1, 3, pages=8, weight_room=ENOUGH).close()
    provider.from_now_on = True
    with pytest.raises(KnownAnswerMismatch, match=r"block_1 to block_4: prompts of 33 and 3: off by"):
        device.load(small, 1, 4, pages=8, weight_room=ENOUGH)
