"""Tiny models, converted once per test process: the same weights in every precision."""

import pytest

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from tests.support.models.tiny_model import write_tiny_model


def _converted(precision: str, *, tokenizer: bool = True):
    @pytest.fixture(scope="session")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
        return open_block_folder(write_tiny_model(tmp_path_factory.mktemp("tiny"), precision, tokenizer=tokenizer))

    return folder


#: Four layers, 64 wide, context 512, with a tokenizer.
w8a8 = _converted("w8a8")
w4a8 = _converted("w4a8")
fp32 = _converted("fp32")
fp16 = _converted("fp16")
#: Blocks 2 and 3 in 4 bits.
mixed_exact = _converted("w8a8,block_2-3=w4a8")
#: Block 2 and the head in float32, block 4 in 4 bits: not exact.
mixed = _converted("w8a8,block_2=fp32,block_4=w4a8,block_5=fp32")
#: Without a tokenizer.
ids_only = _converted("w8a8", tokenizer=False)
