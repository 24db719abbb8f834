"""A tiny model folder, a gateway on it, and a worker played by the test."""

from collections.abc import Iterator

import pytest

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.settings import GatewaySettings
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_converter.convert import convert
from tests.support.cell import Cell
from tests.support.gateway.played import PlayedWorker, RunningGateway, running_gateway
from tests.support.gateway.streams import TEXT
from tests.support.models.checkpoints import write_checkpoint
from tests.support.redis.redis_server import RedisServer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    """One layer, two blocks, 512 tokens, context 512."""
    place = tmp_path_factory.mktemp("model")
    checkpoint = write_checkpoint(place / "hf", seed=1, hidden_size=32, num_hidden_layers=1, intermediate_size=32)
    convert(checkpoint, place / "blocks", precision="fp32", report=lambda *_: None, name="tiny", answers=False)
    return open_block_folder(place / "blocks", blocks=())


@pytest.fixture(scope="session")
def tokenizer(folder: BlockFolder) -> Tokenizer:
    assert folder.tokenizer_path is not None
    return Tokenizer.from_file(folder.tokenizer_path)


@pytest.fixture
def said(tokenizer: Tokenizer) -> list[int]:
    """The tokens that played workers say: those of TEXT."""
    return tokenizer.encode(TEXT, add_special_tokens=False)


@pytest.fixture
def settings(folder: BlockFolder, redis_server: RedisServer) -> GatewaySettings:
    return GatewaySettings(
        model=folder.root, redis_url=redis_server.url, cell="t", keep_alive_s=0.2, grace_s=0.3, max_body_bytes=64 << 10
    )


@pytest.fixture
def gateway(settings: GatewaySettings) -> Iterator[RunningGateway]:
    with running_gateway(settings) as running:
        yield running


@pytest.fixture
def worker(cell: Cell, folder: BlockFolder, tokenizer: Tokenizer) -> PlayedWorker:
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    played = PlayedWorker(
        client=cell.client, scripts=cell.scripts, keys=cell.keys, model=folder.model_key, tokens=tokens
    )
    return played.register()
