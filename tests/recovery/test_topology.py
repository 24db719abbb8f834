"""Two hosts of one topology, each an `up` of its own, share a Redis: each starts its part, and one may go and come."""

import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from tests.support.models.tiny_model import write_tiny_model
from tests.support.redis.redis_server import RedisServer
from tests.support.systems.up_process import UpProcess, starting_up
from tests.support.waiting import wait_until


@pytest.fixture
def topology(tmp_path: Path, own_redis: RedisServer) -> Path:
    write_tiny_model(tmp_path)
    path = tmp_path / "topology.yaml"
    path.write_text(
        f"""
        model: model
        strategy: custom
        boundaries: 1-1,2-5
        targets: cpu:a,cpu:b
        redis: {own_redis.url}
        hosts:
          a: {{roles: [scheduler, gateway, worker], port: 0, devices: [{{id: "cpu:a", bytes_per_second: 20GB/s}}]}}
          b: {{devices: [{{id: "cpu:b", threads: 1, bytes_per_second: 20GB/s}}]}}
        """
    )
    return path


def test_hosts_start_their_parts_and_one_comes_back(topology: Path) -> None:
    def stages() -> list[list[bool]]:
        found = httpx.get(f"{url}/v1/plan").json()
        return [[worker["ready"] for worker in stage["workers"]] for stage in found["stages"]]

    def host(name: str) -> "AbstractContextManager[subprocess.Popen[str]]":
        return starting_up("--topology", str(topology), "--host", name)

    with host("b") as far, host("a") as near:
        a, b = UpProcess(near, None), UpProcess(far, None)
        url = a.url
        assert [(stage["blocks"], stage["devices"]) for stage in httpx.get(f"{url}/v1/plan").json()["stages"]] == [
            ("1-1", ["cpu:a"]),
            ("2-5", ["cpu:b"]),
        ]
        assert len(a.pid_of("blockrelay_worker")) == len(b.pid_of("blockrelay_worker")) == 1
        assert not b.pid_of("blockrelay_gateway") and not b.pid_of("blockrelay_scheduler") and b.url == ""
        first = a.tokens(max_tokens=50)
        assert b.stop() == 0
        wait_until(lambda: stages()[1] == [], "its worker is gone")
        with host("b") as again:
            b = UpProcess(again, None)
            assert a.tokens(max_tokens=50) == first
            assert stages() == [[True], [True]]
            assert b.stop() == 0
        assert a.stop() == 0
