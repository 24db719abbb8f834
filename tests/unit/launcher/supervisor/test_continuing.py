"""The command that `up` prints when it ends with unfinished requests serves the same model at the same port."""

import shlex
from pathlib import Path

from blockrelay.settings import BUNDLED_MODEL
from blockrelay_launcher.onnx_blocks.describe import DescribedBlocks
from blockrelay_launcher.supervisor.unfinished import continuing
from blockrelay_launcher.up_options.groups import NetworkOptions
from blockrelay_launcher.up_options.options import UpOptions

DATA = Path("/data/of mine")


def words(options: UpOptions) -> list[str]:
    return shlex.split(continuing(options, DATA))


def test_the_bundled_model_needs_the_data_folder_alone() -> None:
    assert words(UpOptions(model=BUNDLED_MODEL)) == ["up", "--data", str(DATA)]


def test_another_model_and_port_are_named() -> None:
    options = UpOptions(model=Path("/models/mine"), network=NetworkOptions(port=8450))
    assert words(options) == ["up", "--data", str(DATA), "--model", "/models/mine", "--port", "8450"]


def test_onnx_blocks_are_named_by_their_own_folder() -> None:
    described = DescribedBlocks(folder=Path("/blocks"), model=Path("/cache/described"))
    assert words(UpOptions(model=described.model, blocks=described)) == [
        "up",
        "--data",
        str(DATA),
        "--blocks",
        "/blocks",
    ]
