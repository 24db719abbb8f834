"""Which Redis `up` starts, and what it promises about it."""

import os
import signal
import stat
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from blockrelay.errors import RedisTrouble, ServiceUnavailable, UsageError
from blockrelay.redis.client import connect
from blockrelay_launcher.supervisor.embedded_redis import (
    EmbeddedRedis,
    ServerProgram,
    find_server_program,
    place,
    unplace,
)
from tests.support.waiting import wait_until


@pytest.fixture
def fake_server(tmp_path: Path) -> Callable[[str, str], str]:
    """Make a program that shows a version."""

    def make(name: str, shows: str) -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho '{shows}'\n")
        path.chmod(0o755)
        return str(path)

    return make


NEW, OLD = "Redis server v=7.2.4 sha=00000000:0 malloc=jemalloc-5.3.0", "Redis server v=6.0.16 sha=0"


def test_the_systems_server_comes_first(fake_server: Callable[[str, str], str]) -> None:
    path = fake_server("redis-server", NEW)
    program = find_server_program({"redis-server": path}.get, lambda: None)
    assert program == ServerProgram(path, (7, 2, 4), "")


def test_valkey_will_do(fake_server: Callable[[str, str], str]) -> None:
    path = fake_server("valkey-server", "Valkey server v=8.0.1 sha=00000000:0")
    assert find_server_program({"valkey-server": path}.get, lambda: None).version == (8, 0, 1)


@pytest.mark.parametrize("shows", [OLD, "no version at all"])
def test_an_old_or_broken_server_gives_way_to_the_bundled_one_with_a_warning(
    fake_server: Callable[[str, str], str], shows: str
) -> None:
    old, bundled = fake_server("old", shows), fake_server("bundled", "Redis server v=6.2.14 sha=0")
    program = find_server_program({"redis-server": old}.get, lambda: bundled)
    assert program.path == bundled and program.version == (6, 2, 14)
    assert old in program.warning and "6.2.14" in program.warning and "security" in program.warning


def test_no_server_at_all_says_what_to_do() -> None:
    with pytest.raises(ServiceUnavailable, match=r"install redis-server or valkey-server 6\.2 or newer, or give --r"):
        find_server_program(lambda _: None, lambda: None)


def test_the_bundled_server_exists() -> None:
    program = find_server_program(lambda _: None)
    assert program.version >= (6, 2) and os.access(program.path, os.X_OK) and program.warning


def test_an_activated_environment_does_not_change_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = sysconfig.get_path("scripts")
    others = [folder for folder in os.get_exec_path() if folder != environment]
    monkeypatch.setenv("PATH", os.pathsep.join(others))
    outside = find_server_program()
    monkeypatch.setenv("PATH", os.pathsep.join([environment, *others]))
    assert find_server_program() == outside


def test_a_server_that_would_not_see_the_data_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "control"
    (folder / "appendonlydir").mkdir(parents=True)
    with pytest.raises(
        UsageError, match=r"appendonlydir was written by Redis 7 or later.* is 6\.2\.14.*: install redis-se"
    ):
        place(ServerProgram("/usr/bin/redis-server", (6, 2, 14)), folder, durable=True)
    place(ServerProgram("/usr/bin/valkey-server", (8, 0, 1)), folder, durable=True)
    (folder / "appendonly.aof").touch()
    with pytest.raises(UsageError, match="two histories"):
        place(ServerProgram("/usr/bin/redis-server", (7, 0, 15)), folder, durable=True)


def test_a_later_server_reads_what_an_earlier_one_wrote(tmp_path: Path) -> None:
    later = find_server_program()
    if later.version < (7,):
        pytest.skip("the system has no server from 7 on")
    with started(place(find_server_program(lambda _: None), tmp_path / "data", durable=True)) as (client, _):
        client.set("accepted", "yes")
    for _ in range(2):  # the first takes the file over, the second finds its own
        with started(place(later, tmp_path / "data", durable=True)) as (client, _):
            assert client.get("accepted") == b"yes"


@contextmanager
def started(server: EmbeddedRedis) -> Iterator[tuple[redis.Redis, "subprocess.Popen[bytes]"]]:
    process = subprocess.Popen(server.command(), stdout=subprocess.DEVNULL)
    client = connect(server.url)

    def answers() -> bool:
        try:
            return bool(client.ping())
        except RedisTrouble:
            return False

    wait_until(answers, "the server answers")
    try:
        yield client, process
    finally:
        client.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize("bundled", [False, True], ids=["system or bundled", "bundled"])
def test_what_was_written_survives_kill_9_on_a_private_socket(tmp_path: Path, bundled: bool) -> None:
    program = find_server_program(lambda _: None) if bundled else find_server_program()
    server = place(program, tmp_path / "data", durable=True)
    with started(server) as (client, process):
        client.set("accepted", "yes")
        assert client.config_get("appendfsync")["appendfsync"] == "always"  # pyright: ignore
        assert client.config_get("port")["port"] == "0"  # pyright: ignore
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"  # pyright: ignore
        assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
        process.send_signal(signal.SIGKILL)
        process.wait()
    with started(server) as (client, _):
        assert client.get("accepted") == b"yes"


def test_the_payload_server_keeps_nothing_and_is_bounded(tmp_path: Path) -> None:
    server = place(find_server_program(), tmp_path / "payload", durable=False)
    with started(server) as (client, process):
        client.set("rows", "1")
        assert int(client.config_get("maxmemory")["maxmemory"]) > 0  # pyright: ignore
        process.terminate()
        process.wait()
    assert [p.name for p in (tmp_path / "payload").iterdir()] == []


def test_every_second_is_what_somebody_may_choose(tmp_path: Path) -> None:
    with started(place(find_server_program(), tmp_path / "data", durable=True, fsync="everysec")) as (client, _):
        assert client.config_get("appendfsync")["appendfsync"] == "everysec"  # pyright: ignore


def test_a_socket_path_that_is_too_long_moves(tmp_path: Path) -> None:
    server = place(find_server_program(), tmp_path / ("deep" * 30), durable=True)
    assert len(str(server.socket)) < 100
    with started(server) as (client, _):
        assert client.ping()
    assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
    unplace(server)
    assert not server.socket.parent.exists() and server.folder.exists()


@pytest.mark.parametrize("name", ["a#b", "100%41", "a b?c=d", "at@home"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    server = place(find_server_program(), tmp_path / name, durable=True)
    with started(server) as (client, _):
        client.set("k", "v")
        assert server.socket.is_socket()
    assert name in str(server.socket), "not too long for a socket"
    with started(server) as (client, _):
        assert client.get("k") == b"v"
