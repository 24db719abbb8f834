"""ONNX blocks as they are on a device that is no CPU: its known answers, its tokens, and what it is refused for."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.errors import BlockFolderError, KnownAnswerMismatch, UsageError
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.onnx.as_is.block import AsIsBlock
from blockrelay_worker.execution.onnx.as_is.loading import AsIsExecutors
from blockrelay_worker.execution.onnx.as_is.stage import AsIsStage
from blockrelay_worker.execution.onnx.as_is.warm_blocks import WarmLimits
from blockrelay_worker.execution.onnx.canary import Canary
from blockrelay_worker.execution.onnx.known_answers import PAGES_NEEDED
from blockrelay_worker.execution.onnx.providers.opening import open_provider
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider, Provider
from blockrelay_worker.offline.onnx_blocks.splitting.split import run as split
from tests.support.models.altered_blocks import altered, copied
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks
from tests.support.models.whole_decoders import optimum_decoder, saved

PAGES = (3, 1, 6)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    """In float32."""
    folder = tmp_path_factory.mktemp("wide")
    path = saved(optimum_decoder(float32=True), folder / "whole" / "model.onnx", external=True)
    assert split([str(path), str(folder / "blocks")]) == 0
    return opened(folder / "blocks", folder / "cache")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    """In float16."""
    folder = tmp_path_factory.mktemp("narrow")
    return opened(write_reference_blocks(folder / "blocks", ReferenceModel(layers=2)), folder / "cache")


def loaded(folder: BlockFolder, provider: Provider) -> AsIsStage:
    return AsIsExecutors(provider).loaded(folder, 1, folder.model.blocks, pages=20)[0]


def greedy(stage: AsIsStage, count: int) -> list[int]:
    tokens, first, found = [7, 3, 101, 55, 9], 0, list[int]()
    for _ in range(count):
        step = Segment(rows=len(tokens), first_position=first, pages=PAGES)
        output = stage.run(Batch(segments=[step], tokens=np.array(tokens, np.int32), wanted=[len(tokens) - 1]))
        assert output.logits is not None
        first, tokens = first + len(tokens), [int(output.logits[0].argmax())]
        found += tokens
    return found


@pytest.mark.software_gpu
def test_a_device_gives_the_tokens_of_the_cpu(wide: BlockFolder) -> None:
    """Its blocks have given their known answers before."""
    assert greedy(loaded(wide, open_provider("webgpu:0")), 24) == greedy(loaded(wide, CpuProvider()), 24)


@pytest.mark.software_gpu
@pytest.mark.float16
def test_in_float16_too(narrow: BlockFolder) -> None:
    device, cpu = loaded(narrow, open_provider("webgpu:0")), loaded(narrow, CpuProvider())
    assert greedy(device, 8) == greedy(cpu, 8)


@pytest.mark.software_gpu
@pytest.mark.driver_on_cpu
def test_a_device_without_float16_is_refused_by_name(narrow: BlockFolder) -> None:
    """Where the driver has it, the blocks run."""
    try:
        loaded(narrow, open_provider("webgpu:0")).close()
    except UsageError as refused:
        assert "webgpu:0 cannot run these blocks, which are in float16" in str(refused)


class Planted(CpuProvider):
    """The CPU under another name, as a device that is to be compared with it."""

    name, device = "planted", "planted:0"


def test_a_wrong_block_is_named(narrow: BlockFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose second block computes with other weights."""
    loaded(narrow, Planted()).close()
    _plant(monkeypatch, narrow, tmp_path)
    with pytest.raises(
        KnownAnswerMismatch, match=r"planted:0 computes wrong numbers in block_2: a prompt of 1: "
    ) as found:
        loaded(narrow, Planted())
    assert found.value.block == "block_2"


def _plant(monkeypatch: pytest.MonkeyPatch, narrow: BlockFolder, into: Path, *, provider: str = "planted") -> None:
    """From now on the second block of a device has other weights."""
    assert narrow.onnx_root is not None
    wrong = copied(narrow.onnx_root, into / "wrong", altered("block_2.onnx", _other_weights))
    real: Callable[..., None] = AsIsBlock.__init__

    def planted(self: AsIsBlock, own: Provider, root: Path, *rest: object, **options: object) -> None:
        real(self, own, wrong if own.name == provider else root, *rest, **options)

    monkeypatch.setattr(AsIsBlock, "__init__", planted)


def _other_weights(model: ModelProto) -> None:
    for tensor in model.graph.initializer:
        if tensor.name.endswith("o_proj.weight"):
            values = np.frombuffer(tensor.raw_data, np.float16) * np.float16(1.5)
            tensor.raw_data = values.astype(np.float16).tobytes()


def test_a_wrong_block_of_a_part_is_named(narrow: BlockFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the part takes of earlier blocks is made up."""
    _plant(monkeypatch, narrow, tmp_path)
    for part in ((1, 1), (3, 3)):
        AsIsExecutors(Planted()).loaded(narrow, *part, pages=20)[0].close()
    with pytest.raises(KnownAnswerMismatch, match=r"planted:0 computes wrong numbers in block_2: ") as found:
        AsIsExecutors(Planted()).loaded(narrow, 2, 3, pages=20)
    assert found.value.block == "block_2"


def test_a_stage_that_computes_otherwise_later_is_found(
    narrow: BlockFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary of a part: the same each time, until a block is another one."""
    executors = AsIsExecutors(CpuProvider(), warm=WarmLimits(sessions=1))
    stage, known = executors.loaded(narrow, 2, 2, pages=20)
    canary = Canary(stage, known, first_page=stage.pool.pages - PAGES_NEEDED, tolerance=1e-6)
    for _ in range(2 * len(known.steps)):
        canary.check()
    other, _ = executors.loaded(narrow, 1, 1, pages=20)  # which takes the room of block_2
    _plant(monkeypatch, narrow, tmp_path, provider="cpu")
    with pytest.raises(KnownAnswerMismatch, match="a canary: the device computes wrong numbers in block_2: "):
        canary.check()
    for one in (stage, other):
        one.close()


def test_there_is_no_block_behind_the_last_one(narrow: BlockFolder) -> None:
    with pytest.raises(BlockFolderError, match="there is no block_4: the model has block_1 to block_3"):
        AsIsExecutors(CpuProvider()).loaded(narrow, 3, 4, pages=20)
