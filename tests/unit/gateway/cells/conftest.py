"""Two cells, c0 and c1, by a file of cells; each has a played worker."""

from pathlib import Path

import pytest
import redis

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.cells import cells
from tests.support.gateway.played import PlayedWorker
from tests.support.gateway.several_cells import NAMES, worker_of
from tests.support.redis.redis_server import RedisServer
from tests.support.systems.cell_file import CellFile


@pytest.fixture
def file(tmp_path: Path, redis_server: RedisServer, client: redis.Redis) -> CellFile:
    return CellFile(tmp_path / "cells.json", dict.fromkeys(NAMES, redis_server.url))


@pytest.fixture
def several(settings: GatewaySettings, file: CellFile, monkeypatch: pytest.MonkeyPatch) -> GatewaySettings:
    monkeypatch.setattr(cells, "CELL_FILE_POLL_S", 0.02)
    return settings.model_copy(update={"cell": "c0", "cells": file.path})


@pytest.fixture
def workers(client: redis.Redis, folder: BlockFolder) -> dict[str, PlayedWorker]:
    """A played worker for each cell, by its name."""
    return {name: worker_of(name, client, folder) for name in NAMES}


@pytest.fixture
def apart(own_redis: RedisServer, file: CellFile) -> CellFile:
    """The cell c1 has a Redis of its own, which may die."""
    file.urls["c1"] = own_redis.url
    return file
