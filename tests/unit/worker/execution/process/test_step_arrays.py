"""Tensors by name between a worker and the process of its device: through real frames into the real child, around a
stage that the test plays."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import ExecutionError
from blockrelay_worker.execution.batch import Batch, BlockFault, NamedTensors, Segment, StageOutput
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.execution.page_layout import PageLayout
from blockrelay_worker.execution.process import stage as stage_module
from blockrelay_worker.execution.process.child import Child
from blockrelay_worker.execution.process.device_process import DeviceProcess
from blockrelay_worker.execution.process.frames import Message, read, write
from blockrelay_worker.execution.process.stage import DeviceStage
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks

pytestmark = pytest.mark.onnx_blocks

SEGMENTS = [
    Segment(rows=2, first_position=0, pages=[0]),
    Segment(rows=3, first_position=4, pages=[1]),
]
TOKENS = np.array([1, 2, 3, 4, 5], np.int32)


def part(rows: int, value: int) -> NamedTensors:
    """Of several dtypes and ranks; one is a slice that is not contiguous."""
    wide = np.full((1, rows, 8), value, np.float16)
    arrays: dict[str, Any] = {"hidden": wide[:, :, ::2], "mask": np.ones((1, 1, rows, value), np.bool_)}
    return NamedTensors(rows=rows, arrays=arrays | {"length": np.array(value, np.int64), "none": np.empty((1, 0))})


GIVEN = [[part(2, 2)], [part(1, 5), part(1, 6), part(1, 7)]]


def told(tensors: Any) -> list[list[tuple[int, list[Any]]]]:
    """Every bit of them."""
    return [
        [(p.rows, [(n, a.dtype.str, a.shape, a.tobytes()) for n, a in p.arrays.items()]) for p in parts]
        for parts in tensors
    ]


class Played:
    """A stage in the child that notes what it is given, and hands it on."""

    captured = None
    fault: BlockFault | None = None

    def __init__(self, *, takes_tokens: bool, gives_logits: bool) -> None:
        self.takes_tokens, self.gives_logits = takes_tokens, gives_logits
        self.seen: list[Batch] = []

    def run(self, batch: Batch) -> StageOutput:
        self.seen.append(batch)
        if self.gives_logits:
            return StageOutput(logits=np.ones((len(batch.wanted), 3), np.float32), seconds={"block_2": 0.5})
        return StageOutput(tensors=batch.tensors or GIVEN, seconds={"block_2": 0.5})

    def first_not_finite(self, batch: Batch) -> BlockFault | None:
        self.seen.append(batch)
        return self.fault

    def moved_bytes(self) -> tuple[int, int]:
        return 0, 0


class InThisProcess:
    """A DeviceProcess whose child is an object: what goes between them is written and read as over the pipe."""

    device, lost = "cpu", None

    def __init__(self, stage: Played) -> None:
        self._child = Child(lambda: None)
        self._child._stages[1] = cast(Any, stage)  # pyright: ignore[reportPrivateUsage]
        self._child._provider = CpuProvider()  # pyright: ignore[reportPrivateUsage]

    def ask(self, message: Message, **_: Any) -> Message:
        answer = piped(self._child.answer(piped(message)))
        if answer.kind == "failed":
            raise ExecutionError(answer.fields["text"])
        return answer


def piped(message: Message) -> Message:
    pipe = io.BytesIO()
    write(pipe, message)
    pipe.seek(0)
    return read(pipe)


@pytest.fixture(autouse=True)
def pages_of_any_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which layers a block has is nothing to what travels: each stage has one."""
    layout = PageLayout(layers=1, kv_heads=2, head_dim=16)
    monkeypatch.setattr(stage_module, "layout_of", lambda *_: layout)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockFolder]:
    root: Path = tmp_path_factory.mktemp("blocks")
    yield opened(write_reference_blocks(root / "blocks", ReferenceModel(layers=4)), root / "cache")


def stage_of(folder: BlockFolder, first: int, last: int) -> tuple[DeviceStage, Played]:
    played = Played(takes_tokens=first == 1, gives_logits=last == folder.model.blocks)
    loaded = {"stage": 1, "pages": 4, "details": {}, "max_rows": 8, "max_sequences": 8, "figures": {}}
    process = cast(DeviceProcess, InThisProcess(played))
    return DeviceStage(process, folder, first, last, loaded, numerics_id="n", limit_s=1), played


def test_a_first_stage_takes_tokens_and_hands_on_tensors(raw: BlockFolder) -> None:
    stage, played = stage_of(raw, 1, 2)
    output = stage.run(Batch(segments=SEGMENTS, tokens=TOKENS))
    assert output.tensors is not None and told(output.tensors) == told(GIVEN)
    assert output.hidden is None and output.logits is None and output.seconds == {"block_2": 0.5}
    (seen,) = played.seen
    assert seen.tokens is not None and seen.tokens.tolist() == TOKENS.tolist() and not seen.tensors


def test_a_later_stage_takes_both_and_a_last_one_gives_logits(raw: BlockFolder) -> None:
    batch = Batch(segments=SEGMENTS, tokens=TOKENS, tensors=GIVEN, wanted=[4])
    for last in (3, raw.model.blocks):
        stage, played = stage_of(raw, 2, last)
        output = stage.run(batch)
        (seen,) = played.seen
        assert told(seen.tensors) == told(GIVEN) and seen.hidden is None
        assert seen.tokens is not None and seen.tokens.tolist() == TOKENS.tolist()
        if stage.gives_logits:
            assert output.logits is not None and output.logits.shape == (1, 3) and output.tensors is None
        else:
            assert output.tensors is not None and told(output.tensors) == told(GIVEN)


def test_the_block_that_spoiled_rows_is_looked_for_with_the_same(raw: BlockFolder) -> None:
    stage, played = stage_of(raw, 2, 3)
    played.fault = BlockFault(block="block_3", seconds={"block_2": 0.5, "block_3": 0.25})
    assert stage.first_not_finite(Batch(segments=SEGMENTS, tokens=TOKENS, tensors=GIVEN)) == played.fault
    assert told(played.seen[0].tensors) == told(GIVEN)


@pytest.mark.parametrize("tensors", [[], GIVEN[:1], [GIVEN[0], GIVEN[1][:2]], [*GIVEN, GIVEN[0]]])
def test_tensors_of_other_rows_are_refused_before_they_travel(raw: BlockFolder, tensors: Any) -> None:
    stage, played = stage_of(raw, 2, 3)
    with pytest.raises(ExecutionError, match=r"takes named tensors with \[2, 3\] rows, and got"):
        stage.run(Batch(segments=SEGMENTS, tokens=TOKENS, tensors=tensors))
    assert not played.seen
