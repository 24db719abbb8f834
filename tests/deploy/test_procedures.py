"""The steps of docs/procedures that need no cluster, run: secrets change, and a copy of Redis is restored."""

import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from blockrelay.auth.api_keys import read_keys
from blockrelay.auth.password_file import read_password
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import Scripts
from tests.support.beside import beside
from tests.support.cell import Cell, begin_cell
from tests.support.kubernetes.documented import run, runnable
from tests.support.kubernetes.variants import FAILOVER
from tests.support.redis.redis_server import RedisServer


@pytest.fixture
def top(overlays: dict[str, Path], tmp_path: Path) -> Path:
    """A folder with a copy of deploy/, with the secrets of the overlay production."""
    shutil.copytree(overlays["production"].parents[3] / "deploy", tmp_path / "deploy")
    return tmp_path


def test_a_release_is_replaced_by_its_digests(top: Path) -> None:
    overlay = top / "deploy/k8s/overlays/production"
    before = {one["name"]: one for one in yaml.safe_load((overlay / "kustomization.yaml").read_text())["images"]}
    (block,) = runnable("procedures/upgrade.md")
    run(block, top)
    after = {one["name"]: one for one in yaml.safe_load((overlay / "kustomization.yaml").read_text())["images"]}
    for number, role in enumerate(("gateway", "scheduler", "worker"), start=1):
        name = f"blockrelay/{role}"
        assert after.pop(name) == before.pop(name) | {"digest": f"sha256:{str(number) * 64}"}
    assert after == before, "Redis and its exporter are others' to release"


def test_secrets_are_rotated_step_by_step(top: Path) -> None:
    secrets = top / "deploy/k8s/overlays/production/secrets"
    keys, learn, take, forget, *_, certificate, both, servers, new_alone = runnable("procedures/rotate-secrets.md")
    old, told = (secrets / "passwords" / "gateway").read_text().strip(), (secrets / "gateway.env").read_text()

    def in_use() -> str:
        return read_password(secrets / "passwords" / "gateway")

    def digests() -> int:
        return (secrets / "control.acl").read_text().count(" #")

    known = digests()
    run(learn, top)
    assert in_use() == old and digests() == known + 1
    run(take, top)
    assert in_use() != old and digests() == known + 1
    run(forget, top)
    assert in_use() != old and digests() == known
    assert (secrets / "gateway.env").read_text() == told, "a change of it replaces gateways"

    def believed(certificate: Path) -> bool:
        asked = ["openssl", "verify", "-CAfile", secrets / "ca.crt", certificate]
        return subprocess.run(asked, capture_output=True, check=False).returncode == 0

    first = top / "first.crt"
    shutil.copy(secrets / "tls.crt", first)
    run(certificate, top)
    assert (secrets / "tls.crt").read_text() != first.read_text() and believed(secrets / "tls.crt")
    run(both, top)
    assert believed(first) and believed(secrets / "tls.crt"), "the servers still have the certificate of before"
    run(servers, top)
    assert believed(first) and believed(secrets / "tls.crt")
    run(new_alone, top)
    assert not believed(first) and believed(secrets / "tls.crt")

    run(keys, top)
    assert [key.tenant.name for key in read_keys(secrets / "api-keys.json")] == ["ada-2"]


def test_passwords_of_replicas_sentinels_and_readers_are_rotated_step_by_step(
    overlays: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(overlays[FAILOVER].parents[3] / "deploy", tmp_path / "deploy")
    secrets = tmp_path / "deploy/k8s/overlays/production/secrets"
    _, _, _, _, learn, take, forget, *_ = runnable("procedures/rotate-secrets.md")
    roles = {"replica": "control.acl", "sentinel": "control.acl", "peer": "sentinel.acl", "reader": "sentinel.acl"}
    told = ("replication.env", "sentinel.env", "gateway.env", "scheduler.env", "worker.env")

    def in_use() -> dict[str, str]:
        return {role: read_password(secrets / "passwords" / role) for role in roles}

    def known() -> dict[str, int]:
        """How many passwords each has, where it is let in."""
        lines = {role: (secrets / file).read_text().splitlines() for role, file in roles.items()}
        return {role: next(one for one in lines[role] if one.startswith(f"user {role} ")).count(" #") for role in roles}

    def of_pods() -> list[str]:
        return [(secrets / name).read_text() for name in told]

    first, before = in_use(), of_pods()
    assert set(known().values()) == {1}
    run(learn, tmp_path)
    assert set(known().values()) == {2} and in_use() == first and of_pods() == before, "no pod is replaced"
    run(take, tmp_path)
    assert set(known().values()) == {2} and all(in_use()[role] != first[role] for role in roles)
    after = of_pods()
    assert all(one != other for one, other in zip(before, after, strict=True)), "pods take them from there"
    assert not [old for old in first.values() if old in "".join(after)]
    run(forget, tmp_path)
    assert set(known().values()) == {1} and of_pods() == after, "no pod is replaced a second time"


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """`pod(folder)`: from now on `kubectl exec` runs its command here, and /data is that folder."""

    def inside(folder: Path) -> None:
        stand_in = tmp_path / "bin" / "kubectl"
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(
            '#!/bin/bash\nwhile [ "$1" != -- ]; do shift; done; shift\n'
            f'exec "${{@//\\/data/{str(folder).replace("/", chr(92) + "/")}}}"\n'
        )
        stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")

    return inside


@pytest.mark.skipif(shutil.which("redis-check-aof") is None, reason="install redis-server")
def test_a_copy_that_was_made_under_load_is_restored(
    own_redis: RedisServer, pod: Callable[[Path], None], tmp_path: Path
) -> None:
    if not (own_redis.folder / "appendonlydir").exists():
        pytest.skip("this server keeps one file: the pages are for Redis 7 and newer")
    client, keys = own_redis.client(), Keys("c0")
    begin_cell(client, keys)
    cell = Cell(client, keys, Scripts(client, keys))
    before = [f"req-before-{index}" for index in range(200)]
    for name in before:
        cell.accept(name, limit=100_000)

    def load(over: threading.Event) -> None:
        with own_redis.client() as other:
            busy = Cell(other, keys, Scripts(other, keys))
            for index in range(100_000):
                if over.is_set():
                    return
                busy.accept(f"req-meanwhile-{index}", limit=1_000_000)
                if index % 100 == 50:
                    other.bgrewriteaof()

    with beside(load):
        pod(own_redis.folder)
        (copy,) = runnable("procedures/back-up-redis.md")
        assert "appendonlydir/appendonly.aof.manifest" in run(copy, tmp_path)
    client.close()

    other = RedisServer(tmp_path / "r")
    (other.folder / "appendonlydir").mkdir()
    (other.folder / "appendonlydir" / "appendonly.aof.9.incr.aof").write_text("what was broken")
    pod(other.folder)
    (restore,) = runnable("procedures/restore-redis.md")
    run(restore, tmp_path)
    other.start()
    try:
        with other.client() as restored:
            found = {member.decode() for member in restored.zrange(keys.running, 0, -1)}  # pyright: ignore
        assert {*before} <= found
    finally:
        other.stop()
