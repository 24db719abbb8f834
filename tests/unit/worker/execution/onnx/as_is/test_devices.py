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
    assert narrow.onnx_root is not None
    wrong = copied(narrow.onnx_root, tmp_path / "wrong", altered("block_2.onnx", _other_weights))
    real: Callable[..., None] = AsIsBlock.__init__

    def planted(self: AsIsBlock, provider: Provider, root: Path, *rest: object, **options: object) -> None:
        real(self, provider, wrong if provider.name == "planted" else root, *rest, **options)

    loaded(narrow, Planted()).close()
    monkeypatch.setattr(AsIsBlock, "__init__", planted)
    with pytest.raises(
        KnownAnswerMismatch, match=r"planted:0 computes wrong numbers in block_2: a prompt of 1: "
    ) as found:
        loaded(narrow, Planted())
    assert found.value.block == "block_2"


def _other_weights(model: ModelProto) -> None:
    for tensor in model.graph.initializer:
        if tensor.name.endswith("o_proj.weight"):
            values = np.frombuffer(tensor.raw_data, np.float16) * np.float16(1.5)
            tensor.raw_data = values.astype(np.float16).tobytes()


def test_a_part_of_the_blocks_is_no_stage(narrow: BlockFolder) -> None:
    with pytest.raises(BlockFolderError, match="ONNX blocks are served together: block_1 to block_3"):
        AsIsExecutors(CpuProvider()).loaded(narrow, 1, 2, pages=20)
