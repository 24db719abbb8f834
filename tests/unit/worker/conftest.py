"""Tiny models, converted once per test process."""

from pathlib import Path

import pytest

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay_converter.convert import convert
from tests.support.models.checkpoints import write_checkpoint


def _report(what: str, done: int, total: int) -> None:
    """Nobody watches the progress of a test."""


def _converted(root: Path, precision: str, *, tokenizer: bool = True) -> BlockFolder:
    write_checkpoint(root / "checkpoint", seed=3, tokenizer=tokenizer)
    convert(root / "checkpoint", root / "folder", precision=precision, report=_report, name="tiny")
    return open_block_folder(root / "folder")


@pytest.fixture(scope="session")
def w8a8(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    """Four layers, 64 wide, context 512, with a tokenizer."""
    return _converted(tmp_path_factory.mktemp("w8a8"), "w8a8")


@pytest.fixture(scope="session")
def w4a8(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    """The same weights in 4 bits."""
    return _converted(tmp_path_factory.mktemp("w4a8"), "w4a8")


@pytest.fixture(scope="session")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    """The same weights in float32."""
    return _converted(tmp_path_factory.mktemp("fp32"), "fp32")


@pytest.fixture(scope="session")
def fp16(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    """The same weights in float16."""
    return _converted(tmp_path_factory.mktemp("fp16"), "fp16")


@pytest.fixture(scope="session")
def mixed_exact(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    """The same weights, blocks 2 and 3 in 4 bits."""
    return _converted(tmp_path_factory.mktemp("mixed_exact"), "w8a8,block_2-3=w4a8")


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    """The same weights, block 2 and the head in float32, block 4 in 4 bits: not exact."""
    return _converted(tmp_path_factory.mktemp("mixed"), "w8a8,block_2=fp32,block_4=w4a8,block_5=fp32")


@pytest.fixture(scope="session")
def ids_only(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    """The w8a8 model without a tokenizer."""
    return _converted(tmp_path_factory.mktemp("ids"), "w8a8", tokenizer=False)
