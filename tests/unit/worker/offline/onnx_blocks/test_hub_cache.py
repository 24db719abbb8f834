"""ONNX models in Hugging Face's cache, where each file is a link."""

import os
from pathlib import Path

import pytest

from blockrelay.onnx_blocks.served_shape import served_shape, served_wiring
from blockrelay_worker.execution.onnx.as_is.block import AsIsBlock
from blockrelay_worker.execution.onnx.providers.provider import CpuProvider
from blockrelay_worker.offline.onnx_blocks import check
from blockrelay_worker.offline.onnx_blocks.splitting import split
from tests.support.models.genai_decoder import genai_decoder
from tests.support.models.hub_cache import cached
from tests.support.models.onnx_blocks_served import opened
from tests.support.models.whole_decoders import saved

pytestmark = pytest.mark.onnx_blocks

CHECK = ["--device", "cpu", "--batch", "2", "--sequence", "3", "--past", "0"]


def test_blocks_are_checked_where_they_are(with_weights_beside: Path, tmp_path: Path) -> None:
    snapshot = cached(with_weights_beside, tmp_path / "hub")
    assert (snapshot / "block_2.onnx.data").is_symlink()
    assert check.run([*CHECK, str(snapshot)]) == 0


def test_blocks_are_served_where_they_are(with_weights_beside: Path, tmp_path: Path) -> None:
    snapshot = cached(with_weights_beside, tmp_path / "hub")
    folder = opened(snapshot, tmp_path / "made")
    assert (folder.onnx_root, folder.model.name) == (snapshot, "acme/tiny-1b")
    wiring = served_wiring(folder.root)
    block = AsIsBlock(CpuProvider(), snapshot, wiring, served_shape(wiring), 4, steps="few")
    assert [one.name for one in block.session.get_outputs()] == ["blockrelay/logits"]


@pytest.mark.parametrize("where", [".", "onnx"])
@pytest.mark.parametrize("options", [[], ["--copy-weights"]], ids=["linked", "cut"])
def test_a_model_is_split_into_blocks_of_their_own(where: str, options: list[str], tmp_path: Path) -> None:
    whole = saved(genai_decoder(), tmp_path / "whole" / where / "model.onnx", external=True)
    snapshot = cached(tmp_path / "whole", tmp_path / "hub")
    out = tmp_path / "out"
    assert split.run([str(snapshot / where / whole.name), str(out), *options]) == 0
    assert not [path for path in out.iterdir() if path.is_symlink()], "they are as good without the cache"
    assert check.run([*CHECK, str(out)]) == 0


@pytest.mark.parametrize("to", ["../../../elsewhere", "../../../models--acme--other/blobs/x"])
def test_a_link_out_of_the_repository_is_refused(
    to: str, with_weights_beside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = cached(with_weights_beside, tmp_path / "hub")
    weights = snapshot / "block_2.onnx.data"
    target = Path(os.path.normpath(snapshot / to))
    target.parent.mkdir(parents=True, exist_ok=True)
    weights.resolve().rename(target)
    weights.unlink()
    weights.symlink_to(to)
    assert weights.is_file()
    assert check.run([*CHECK, str(snapshot)]) == 2
    assert "'block_2.onnx.data' is a link out of the folder" in capsys.readouterr().err
