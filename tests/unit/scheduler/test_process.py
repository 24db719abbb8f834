"""`python -m blockrelay_scheduler` as a process."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.protocol.keys import Keys
from blockrelay.redis import client as redis_link
from blockrelay.redis.registry import read_plan
from tests.support.logs import entries
from tests.support.models.tiny_model import BLOCKS
from tests.support.redis.redis_server import RedisServer
from tests.support.scraping import assert_service_describes_itself
from tests.support.waiting import wait_until

pytestmark = pytest.mark.thorough


def command(**settings: object) -> tuple[list[str], dict[str, str]]:
    env = {f"BLOCKRELAY_{name.upper()}": str(value) for name, value in settings.items()}
    return [sys.executable, "-m", "blockrelay_scheduler"], {**os.environ, **env}


def status_of(url: str) -> int | None:
    """The HTTP status, None while nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None


def test_it_waits_for_redis_publishes_a_plan_and_ends_at_sigterm(
    tiny_model: Path, own_redis: RedisServer, tmp_path: Path
) -> None:
    own_redis.kill()
    argv, env = command(model=tiny_model, redis_url=own_redis.url, port=0, stages=2, cell="t")
    log = tmp_path / "log"
    with log.open("wb") as written, subprocess.Popen(argv, env=env, stderr=written) as process:
        try:
            wait_until(lambda: log.read_bytes().count(b"\n"), "it says where it listens")
            port = entries(log)[0]["data"]["port"]
            wait_until(lambda: status_of(f"http://127.0.0.1:{port}/readyz") == 503, "it says that it is not ready")
            own_redis.start()
            wait_until(lambda: status_of(f"http://127.0.0.1:{port}/readyz") == 200, "it is ready")
            assert status_of(f"http://127.0.0.1:{port}/livez") == 200
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                assert_service_describes_itself(answer.read().decode(), "scheduler")
            client = redis_link.connect(own_redis.url)
            (plan,) = list(client.scan_iter(Keys("t").plan("*")))
            assert b"1-3,4-5" in (client.hget(plan, "plan") or b"")  # pyright: ignore[reportOperatorIssue]
            client.close()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=10)
    assert process.returncode == 0
    events = [event["event_type"] for event in entries(log)]
    assert events[0] == "NODE_READY" and events[-1] == "NODE_STOPPED"
    assert {"REDIS_TROUBLE", "REDIS_BACK", "PLAN_IN_FORCE"} <= set(events)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"stages": 6}, f"blockrelay: stages is 6, but the model has {BLOCKS} blocks: choose 1 to {BLOCKS}"),
        ({"stages": "many"}, "blockrelay: BLOCKRELAY_STAGES: Input should be a valid integer"),
        ({"model": "/nowhere"}, "blockrelay: /nowhere: no such block folder"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    tiny_model: Path, settings: dict[str, object], complaint: str
) -> None:
    argv, env = command(**{"model": tiny_model, **settings})
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(complaint) and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"strategy": "magic"}, "there is no strategy magic"),
        ({"strategy": "auto", "plan": "/p"}, "BLOCKRELAY_PLAN and BLOCKRELAY_STRATEGY: give one of them"),
        ({"strategy": "auto", "profile": "/nowhere/p"}, "/nowhere/p: No such file"),
        ({"stages": BLOCKS + 1}, f"but the model has {BLOCKS} blocks"),
    ],
)
def test_stages_that_cannot_be_are_one_line(tiny_model: Path, settings: dict[str, object], line: str) -> None:
    argv, env = command(model=tiny_model, redis_url="unix:///none", port=0, **settings)
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and line in done.stderr, done


def test_a_strategy_of_its_settings_is_published(tiny_model: Path, own_redis: RedisServer, tmp_path: Path) -> None:
    speed = {"bytes_per_second": 2e10, "operations_per_second": 2e11}
    devices = [{"id": name, "class": "CPU", "host": name, **speed} for name in ("a", "b")]
    (tmp_path / "devices.json").write_text(json.dumps({"devices": devices}))
    argv, env = command(
        model=tiny_model,
        redis_url=own_redis.url,
        port=0,
        cell="t",
        strategy="uniform",
        devices=tmp_path / "devices.json",
    )
    with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL) as process, own_redis.client() as client:
        try:
            key = open_block_folder(tiny_model, blocks=[]).model_key
            wait_until(lambda: read_plan(client, Keys("t"), key) is not None, "it has published a plan")
            plan = read_plan(client, Keys("t"), key)
            assert plan is not None and plan.devices == (("a",), ("b",))
            process.terminate()
            assert process.wait(10) == 0
        finally:
            process.kill()
