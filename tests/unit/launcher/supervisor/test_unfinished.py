"""What `up` says of unfinished requests that it cannot finish: how many, of which model, and what finishes them."""

import hashlib
import json
from pathlib import Path

import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import BlockFolderError, UsageError
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import Scripts
from blockrelay.settings import BUNDLED_MODEL
from blockrelay.typed_command import typed_path
from blockrelay_launcher.supervisor.unfinished import read_unfinished, remember_served, why_not_served
from blockrelay_launcher.up_options.groups import NetworkOptions
from blockrelay_launcher.up_options.options import UpOptions
from tests.support.cell import MODEL, Cell, begin_cell
from tests.support.redis.redis_server import RedisServer

OWN, OTHER = "a" * 16, "b" * 16
OPTIONS = UpOptions(model=Path("/models/own"), network=NetworkOptions(port=8450))


def test_requests_that_this_system_finishes_are_no_matter(tmp_path: Path) -> None:
    assert not why_not_served({}, OWN, OPTIONS, tmp_path)
    assert not why_not_served({OWN: 3}, OWN, OPTIONS, tmp_path)


def test_a_folder_that_this_release_reads_is_served_by_the_command_that_is_named(tmp_path: Path) -> None:
    model = open_block_folder(BUNDLED_MODEL, blocks=[]).model_key
    remember_served(UpOptions(model=BUNDLED_MODEL), tmp_path, model)
    with pytest.raises(UsageError) as refused:
        why_not_served({model: 24}, OWN, OPTIONS, tmp_path)
    line = str(refused.value)
    assert f"24 of {model} ({BUNDLED_MODEL})" in line and "than /models/own" in line and "\n" not in line
    assert f"up --data {typed_path(tmp_path)} --port 8450`" in line and "or give another --data" in line


def test_a_folder_of_another_format_is_for_the_release_that_accepted_them(tmp_path: Path) -> None:
    """That release, killed, has left its up.json alone."""
    older = tmp_path / "older"
    older.mkdir()
    (older / "manifest.json").write_text(json.dumps({"format": 1}))
    model = hashlib.sha256((older / "manifest.json").read_bytes()).hexdigest()[:16]
    running = {"pid": 1, "url": "", "urls": [], "redis_url": "", "payload_redis_url": None, "cell": "c0"}
    (tmp_path / "up.json").write_text(json.dumps(running | {"model": str(older)}))
    with pytest.raises(UsageError, match="with the release that accepted them") as refused:
        why_not_served({model: 1}, OWN, OPTIONS, tmp_path)
    assert f"`blockrelay up --data {typed_path(tmp_path)} --model {typed_path(older)}`" in str(refused.value)


def test_a_folder_that_has_another_model_now_is_not_named(tmp_path: Path) -> None:
    remember_served(UpOptions(model=BUNDLED_MODEL), tmp_path, OTHER)
    with pytest.raises(UsageError, match=f": 2 of {OTHER}; .* with the folder, .* --model FOLDER`"):
        why_not_served({OTHER: 2}, OWN, OPTIONS, tmp_path)


def test_where_it_can_finish_some_it_serves_those(tmp_path: Path) -> None:
    """Else the folders of both would be refused, each for the other's sake."""
    assert f": 2 of {OTHER};" in why_not_served({OWN: 1, OTHER: 2}, OWN, OPTIONS, tmp_path)


def test_unfinished_requests_are_counted_by_their_model(own_redis: RedisServer) -> None:
    keys = Keys("c0")
    with own_redis.client() as client:
        assert read_unfinished(own_redis.url, keys) == {}
        begin_cell(client, keys)
        cell = Cell(client, keys, Scripts(client, keys))
        for index in range(3):
            cell.accept(f"req-{index}")
        client.hset(keys.request("req-2"), "model", OTHER)
        assert read_unfinished(own_redis.url, keys) == {MODEL: 2, OTHER: 1}
        assert read_unfinished(own_redis.url, Keys("c1")) == {}
        client.set(keys.protocol, 1)
        assert read_unfinished(own_redis.url, keys) == {}, "records of another protocol are not read"


def test_a_manifest_of_another_format_is_named_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(BlockFolderError, match=f"{tmp_path}/manifest.json: format 1 was made by an older release"):
        open_block_folder(tmp_path)
