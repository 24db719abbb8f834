"""A small folder of ONNX blocks, once with weights inside and once beside them."""

from pathlib import Path

import pytest

from tests.support.models.reference_blocks import ReferenceModel, write_reference_blocks


@pytest.fixture(scope="session")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers and the head."""
    return write_reference_blocks(tmp_path_factory.mktemp("onnx") / "blocks", ReferenceModel(layers=3))


@pytest.fixture(scope="session")
def with_weights_beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in files of their own."""
    return write_reference_blocks(tmp_path_factory.mktemp("onnx") / "beside", ReferenceModel(layers=3), external=True)
