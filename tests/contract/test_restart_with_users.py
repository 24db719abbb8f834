"""A server with the users that we ship is killed and started again: what scripts have written is there."""

import hashlib
from pathlib import Path

import pytest

from blockrelay.errors import RedisRefused
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import TokenEntry
from blockrelay.protocol.number import PROTOCOL
from blockrelay.redis import client as redis_link
from blockrelay.redis.client import Scripts
from blockrelay.redis.users import ROLES, rules
from tests.support.cell import Cell
from tests.support.project import ROOT
from tests.support.redis.redis_server import RedisServer


def shipped() -> list[str]:
    """The lines of deploy/redis/control.acl, each role with its name as the password."""
    text = (ROOT / "deploy" / "redis" / "control.acl").read_text()
    for role in ROLES:
        text = text.replace(f"{role.upper()}_SHA256", hashlib.sha256(role.encode()).hexdigest())
    return text.splitlines()


def test_what_scripts_wrote_is_there_again(tmp_path: Path) -> None:
    """Servers run what is between MULTI and EXEC in their append-only file as the user `default`."""
    server, keys = RedisServer(tmp_path / "redis", users=shipped()).start(), Keys("c0")
    try:
        with server.client() as client:
            cell = Cell(client, keys, Scripts(client, keys))
            client.set(keys.protocol, PROTOCOL)
            cell.worker("w", split="1-4")
            for name in ("running", "queued"):
                cell.accept(name)
            (run, *_) = cell.claim("w", most=1)
            cell.commit(run, 0, [7, 8])
            names, record = set(client.scan_iter()), cell.record(run.request_id)  # pyright: ignore
        server.kill()
        server.start()
        with server.client() as client:
            cell = Cell(client, keys, Scripts(client, keys))
            assert set(client.scan_iter()) == names and cell.record(run.request_id) == record  # pyright: ignore
            assert [entry.token for entry in cell.log(run.request_id) if isinstance(entry, TokenEntry)] == [7, 8]
            assert client.acl_log() == [], "nobody was refused anything"
    finally:
        server.stop()


@pytest.mark.parametrize("place", ["", "default:@", "default:default@"])
def test_nobody_comes_as_the_user_that_may_everything(tmp_path: Path, place: str) -> None:
    server = RedisServer(tmp_path / "redis", users=shipped()).start()
    try:
        with redis_link.connect(f"unix://{place}{server.socket}") as client, pytest.raises(RedisRefused):
            client.get("anything")
    finally:
        server.stop()


@pytest.mark.parametrize("server", ["control", "payload"])
def test_the_files_say_so(server: str) -> None:
    first = rules("control" if server == "control" else "payload")[0]
    assert first == "user default off resetpass ~* &* +@all"
