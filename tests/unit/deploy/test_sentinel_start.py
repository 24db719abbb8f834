"""How pods of a Redis that fails over start: the server that a replica follows, and the state that a Sentinel keeps."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.project import ROOT

CONFIG = ROOT / "deploy" / "k8s" / "components" / "sentinel" / "config"
SERVER = "blockrelay-redis-control-{}.blockrelay-redis-pods.models.svc"
Start = Callable[..., tuple[str, str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """`start(script, pod, *arguments, said=..., **environment)`: the arguments of redis-server, and its configuration.

    `said`: what the three Sentinels answer, round by round.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / "data").mkdir()

    def program(name: str, text: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    program("sleep", f"echo . >>{tmp_path}/rounds")
    program("redis-server", 'echo "$@"')
    program("redis-cli", f'echo "$@" "${{REDISCLI_AUTH-}}" >>{tmp_path}/asked; sh {tmp_path}/said "$2"')

    def run(script: str, pod: str, *arguments: str, said: list[list[str]] = [[]], **more: str) -> tuple[str, str]:  # noqa: B006
        (tmp_path / "rounds").write_text("")
        lines = [
            f"blockrelay-sentinel-{number}.*:{now}) echo '{answer}' ;;"
            for now, answers in enumerate(said)
            for number, answer in enumerate(answers)
        ]
        (tmp_path / "said").write_text(
            f'case "$1:$(wc -l <{tmp_path}/rounds)" in\n' + "\n".join(lines) + "\n*) exit 1 ;;\nesac\n"
        )
        env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "DATA": str(tmp_path / "data"), "HOSTNAME": pod}
        done = subprocess.run(
            ["sh", CONFIG / script, *arguments],
            env={**env, "NAMESPACE": "models", **more},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        conf = {"start-redis": "redis.conf", "start-sentinel": "sentinel.conf"}[script]
        return done.stdout.strip(), (tmp_path / "data" / conf).read_text()

    return run


def test_a_server_follows_whom_two_sentinels_name(start: Start, tmp_path: Path) -> None:
    said = [[SERVER.format(2), SERVER.format(2)]]
    called, conf = start("start-redis", "blockrelay-redis-control-0", "redis-server", "--save", "", said=said)
    assert called == f"{tmp_path}/data/redis.conf --save"
    assert f"replica-announce-ip {SERVER.format(0)}\n" in conf and f"replicaof {SERVER.format(2)} 6379\n" in conf
    assert "master" not in conf and "--tls" not in (tmp_path / "asked").read_text()


def test_the_one_they_name_is_the_master(start: Start) -> None:
    said = [[SERVER.format(0)] * 3]
    _, conf = start("start-redis", "blockrelay-redis-control-0", "redis-server", said=said)
    assert "replicaof" not in conf and f"replica-announce-ip {SERVER.format(0)}" in conf


@pytest.mark.parametrize(
    "first",
    [
        [],
        [SERVER.format(0)],
        [SERVER.format(0), SERVER.format(1), SERVER.format(2)],
        ["NOAUTH Authentication required."] * 3,
    ],
    ids=["none answers", "one answers", "they disagree", "they refuse"],
)
def test_a_server_does_not_begin_by_itself(start: Start, tmp_path: Path, first: list[str]) -> None:
    """A server that starts again follows the master, also the first one, whose data may be the oldest."""
    said = [first, first, [SERVER.format(1), SERVER.format(0), SERVER.format(1)]]
    _, conf = start("start-redis", "blockrelay-redis-control-0", "redis-server", said=said)
    assert f"replicaof {SERVER.format(1)} 6379\n" in conf
    assert len((tmp_path / "rounds").read_text().split()) == 2


def test_with_tls_and_users_it_asks_and_follows_so(start: Start, tmp_path: Path) -> None:
    passwords = {"READER_PASSWORD": "of-the-reader", "REPLICA_PASSWORD": "of-the-replica"}
    arguments = ("redis-server", "--port", "0", "--tls-port", "6379")
    said = [[SERVER.format(2)] * 2]
    called, conf = start("start-redis", "blockrelay-redis-control-1", *arguments, said=said, **passwords)
    assert called.endswith("--port 0 --tls-port 6379 --tls-replication yes")
    assert "masteruser replica\nmasterauth of-the-replica\n" in conf
    asked = (tmp_path / "asked").read_text()
    assert "--tls --cacert /etc/redis/tls/ca.crt --user reader" in asked and "of-the-reader" in asked
    assert (tmp_path / "data" / "redis.conf").stat().st_mode & 0o077 == 0, "it has a password"


def test_a_sentinel_keeps_what_it_has_learned_and_takes_new_passwords(start: Start, tmp_path: Path) -> None:
    called, conf = start("start-sentinel", "blockrelay-sentinel-1", "--port", "26379")
    assert called == f"{tmp_path}/data/sentinel.conf --sentinel --port 26379"
    assert f"sentinel monitor blockrelay {SERVER.format(0)} 6379 2\n" in conf
    assert "sentinel announce-ip blockrelay-sentinel-1.blockrelay-sentinel.models.svc\n" in conf
    assert not [word for word in ("HOST", "MASTER", "PORT", "auth") if word in conf.partition("first start")[2]]
    path = tmp_path / "data" / "sentinel.conf"
    path.write_text(conf.replace(SERVER.format(0), SERVER.format(2)) + "sentinel auth-pass blockrelay old\n")
    passwords = {"SENTINEL_PASSWORD": "new", "PEER_PASSWORD": "newer"}
    _, conf = start("start-sentinel", "blockrelay-sentinel-1", **passwords)
    assert f"sentinel monitor blockrelay {SERVER.format(2)} 6379 2\n" in conf, "the master of today"
    assert conf.endswith(
        "sentinel auth-user blockrelay sentinel\nsentinel auth-pass blockrelay new\n"
        "sentinel sentinel-user peer\nsentinel sentinel-pass newer\n"
    )
    assert "old" not in conf
