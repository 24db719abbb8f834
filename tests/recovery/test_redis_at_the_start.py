"""What a Redis says when a service starts: refused for ever is exit code 2 and one line, away is waited for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.redis.redis_server import RedisServer
from tests.support.systems.system import StartSystem, make_jobs, serve

SERVICES = ("gateway", "scheduler", "worker")


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("server", ["control", "payload"])
@pytest.mark.parametrize("how", ["wrong password", "no rights"])
def test_a_redis_that_refuses_at_the_start_is_one_line(
    tiny_model: Path, own_redis: RedisServer, redis_server: RedisServer, service: str, server: str, how: str
) -> None:
    admin = own_redis.client()
    if how == "no rights":
        admin.execute_command("ACL", "SETUSER", "someone", "on", ">x", "-@all")
    admin.close()
    refusing = f"unix://someone:x@{own_redis.socket}"
    urls = {"control": redis_server.url, "payload": redis_server.url, server: refusing}
    env = {
        "BLOCKRELAY_MODEL": str(tiny_model),
        "BLOCKRELAY_REDIS_URL": urls["control"],
        "BLOCKRELAY_PAYLOAD_REDIS_URL": urls["payload"],
        "BLOCKRELAY_PORT": "0",
        "BLOCKRELAY_LOG_LEVEL": "ERROR",
    }
    argv = [sys.executable, "-m", f"blockrelay_{service}"]
    done = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert done.returncode == 2, done.stderr
    assert f"the {server} Redis does not let us in" in line


def test_a_worker_of_the_whole_model_serves_without_a_payload_redis(start_system: StartSystem) -> None:
    system = start_system(stages=1)
    system.payload.kill()
    first = system.workers[0]
    first.terminate()
    first.wait(30)
    system.start_worker()
    system.wait_ready(1)
    jobs = make_jobs(3, seed=31, vocab=500)
    serve(system, jobs)
