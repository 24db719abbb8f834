"""`blockrelay up` under kill -9: of itself, of a worker, of Redis; and its clean end."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.keys import Keys
from blockrelay_launcher.drill.system import command_line, environment_of
from tests.support.gateway.sse_client import read_events
from tests.support.redis.redis_server import RedisServer
from tests.support.systems.failing_gpus import failing_gpus
from tests.support.systems.up_process import (
    COMMAND,
    UpProcess,
    refusal,
    run_command,
    running_up,
)
from tests.support.waiting import wait_until


@pytest.fixture
def data() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="br-up-") as folder:
        yield Path(folder)


def in_shared_memory() -> set[str]:
    """What lies in /dev/shm, folders of pages aside: those of other tests come and go."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("blockrelay-")}


def page_folder(up: UpProcess) -> Path:
    """Where the workers of an `up` share pages."""
    folder = Path(environment_of(up.pid_of("blockrelay_worker")[0])["BLOCKRELAY_PAGE_STORE_FOLDER"])
    assert folder.parent == Path("/dev/shm")
    return folder


def test_ctrl_c_drains_and_leaves_nothing_and_nobody_else_may_use_its_port_or_data(
    tiny_model: Path, data: Path
) -> None:
    shared_memory = in_shared_memory()
    with running_up(tiny_model, "--stages", "2", data=data) as up:
        children = up.children()
        assert len(children) == 6, "two Redis, the scheduler, two workers and the gateway"
        assert len(up.tokens()) == 40
        pages = page_folder(up)
        wait_until(lambda: len(list(pages.iterdir())) >= 1 + 2 * 2, "both stages share their full pages")

        port = up.url.rpartition(":")[2]
        line = refusal("up", "--model", str(tiny_model), "--port", port)
        assert f"port {port}" in line and "--port" in line
        line = refusal("up", "--model", str(tiny_model), "--port", "0", "--data", str(data))
        assert str(up.process.pid) in line and str(data) in line
        assert up.children() == children, "neither has disturbed it"

        found = up.status()
        assert [w["state"] for w in found["workers"]] == ["ready", "ready"] and not found["missing"]
        shown = run_command("status", "--data", data)
        assert "stage" in shown.stdout and "in flight: 0" in shown.stdout

        assert up.stop(signal.SIGINT) == 0
        assert not any(command_line(pid) for pid in children)
    assert not (data / "up.json").exists()
    assert not pages.exists() and in_shared_memory() == shared_memory
    for log in data.glob("logs/*worker*.log"):
        assert "NODE_DRAINING" in log.read_text() and "ERROR" not in log.read_text()


def test_killed_with_9_it_leaves_no_orphan_and_the_next_one_goes_on_with_what_was_accepted(
    tiny_model: Path, data: Path
) -> None:
    with running_up(tiny_model, data=data) as up:
        undisturbed = up.tokens(max_tokens=300)
        children = up.children()
        (worker,) = up.pid_of("blockrelay_worker")
        os.kill(worker, signal.SIGSTOP)  # so that the request is accepted and not finished
        accepted = up.complete(max_tokens=300, background=True)
        up.stop(signal.SIGKILL)
        wait_until(lambda: not any(command_line(pid) for pid in children), "all children have ended")
    with running_up(tiny_model, data=data) as up:
        assert up.finished(own_id(accepted["id"])) == undisturbed
        assert up.stop() == 0


def test_a_stream_that_is_under_way_does_not_hold_the_end_up_and_is_told_how_to_go_on(
    tiny_model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker goes first: it would wait for its gateway's whole drain in vain."""
    monkeypatch.setenv("BLOCKRELAY_INJECT_SPEED", "0.001")
    monkeypatch.setenv("BLOCKRELAY_DRAIN_S", "0")
    body = {"prompt": [1, 5, 9], "max_tokens": 300, "stream": True, "ignore_eos": True}
    with running_up(tiny_model, data=data) as up:
        with httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=60) as response:
            up.process.send_signal(signal.SIGINT)
            *_, error, done = read_events(response)
        assert done.data == "DONE" and "/v1/requests/cmpl-" in error.data["error"]["message"]
        assert up.process.wait(40) == 0


def test_a_body_that_is_on_its_way_does_not_hold_the_end_up(tiny_model: Path, data: Path) -> None:
    with running_up(tiny_model, data=data) as up, socket.socket() as slow:
        slow.connect(("127.0.0.1", int(up.url.rpartition(":")[2])))
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000\r\n\r\n{")
        assert httpx.get(f"{up.url}/livez").status_code == 200, "the gateway has had a moment to begin with it"
        assert up.stop() == 0
        answer = b"".join(iter(lambda: slow.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 503") and b"shuts down" in answer
    (log,) = data.glob("logs/*gateway*.log")
    assert "ERROR" not in log.read_text()


def test_what_is_unfinished_outlives_an_up_without_a_data_folder(
    tiny_model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(data))  # where it makes its folder
    with running_up(tiny_model) as up:
        assert up.stop() == 0
        assert not list(data.glob("blockrelay-*")), "nothing was left to do"
    with running_up(tiny_model) as up:
        (worker,) = up.pid_of("blockrelay_worker")
        os.kill(worker, signal.SIGSTOP)  # so that the request is accepted and not finished
        name = up.complete(max_tokens=300, background=True)["id"]
        assert up.stop() == 0
    (folder,) = data.glob("blockrelay-*")
    with running_up(tiny_model, data=folder) as up:
        completed = lambda: httpx.get(f"{up.url}/v1/requests/{name}").json()["status"] == "completed"  # noqa: E731
        wait_until(completed, "the next one goes on with it")
        assert up.stop() == 0
    assert folder.exists()


def test_a_killed_worker_and_a_killed_redis_are_replaced_and_requests_go_on(tiny_model: Path, data: Path) -> None:
    with running_up(tiny_model, "--stages", "2", "--verbose", data=data) as up:
        undisturbed = up.tokens(max_tokens=120)
        for victim in ("blockrelay_worker", "control/redis.sock", "payload/redis.sock", "blockrelay_scheduler"):
            before = up.pid_of(victim)
            with httpx.stream("POST", f"{up.url}/v1/completions", timeout=60, json={
                "model": "tiny", "prompt": [1, 5, 9], "max_tokens": 120, "temperature": 0, "ignore_eos": True,
                "stream": True, "return_token_ids": True,
            }) as stream:  # fmt: skip
                seen: list[int] = []
                for line in stream.iter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        seen += chunk["choices"][0].get("token_ids", [])
                        if len(seen) == 20:
                            os.kill(before[0], signal.SIGKILL)
            assert seen == undisturbed, f"after the death of {victim}"
            again = lambda v=victim, b=before: len(up.pid_of(v)) == len(b) and b[0] not in up.pid_of(v)  # noqa: E731
            wait_until(again, f"{victim} is there again")
        assert up.stop() == 0


def test_a_model_that_was_altered_ends_the_start_with_the_name_of_the_file(tiny_model: Path, tmp_path: Path) -> None:
    altered = tmp_path / "model"
    altered.mkdir()
    for path in tiny_model.rglob("*"):
        target = altered / path.relative_to(tiny_model)
        target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())
    block = altered / "blocks" / "block_2.bin"
    content = bytearray(block.read_bytes())
    content[100] ^= 1
    block.write_bytes(content)
    started = time.monotonic()
    done = run_command("up", "--model", altered, "--port", "0")
    assert done.returncode == 2 and not done.stdout and "block_2.bin" in done.stderr.splitlines()[-1]
    assert time.monotonic() - started < 30


def test_a_port_taken_by_somebody_else_is_one_line_and_starts_nothing(tiny_model: Path, data: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refusal("up", "--model", str(tiny_model), "--port", port, "--data", str(data))
    assert f"port {port}" in line and not list(data.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cors-origins", "chat.example.com"), "is not an origin"),
        (("--allowed-hosts", "a b"), "is not a host name"),
        (("--api-keys", "/nowhere/keys"), "/nowhere/keys cannot be read"),
    ],
    ids=["origin", "host", "keys"],
)
def test_a_mistake_in_an_option_is_one_line_and_starts_nothing(
    tiny_model: Path, data: Path, options: tuple[str, ...], said: str
) -> None:
    assert said in refusal("up", "--model", str(tiny_model), "--port", "0", "--data", str(data), *options)
    assert not list(data.iterdir())


def test_a_setting_that_no_service_reads_is_one_line_and_starts_nothing(tiny_model: Path, data: Path) -> None:
    (data / "settings").mkdir()
    (data / "settings" / "gateway-1").write_text("BLOCKRELAY_LOG_LEVEL=DEBUG\n")
    assert "gateway-1 is for none" in refusal("up", "--model", str(tiny_model), "--port", "0", "--data", str(data))
    (data / "settings" / "gateway-1").rename(data / "settings" / "gateway")
    (data / "settings" / "gateway").write_text("BLOCKRELAY_LOG_LEVEL DEBUG\n")
    assert "is not NAME=VALUE" in refusal("up", "--model", str(tiny_model), "--port", "0", "--data", str(data))


def test_gpus_that_are_not_here_are_one_line(tiny_model: Path) -> None:
    """`up` takes real ones or none."""
    start = ("up", "--model", str(tiny_model), "--port", "0")
    assert "--gpu-workers 99: here is " in refusal(*start, "--gpu-workers", "99")
    assert "--gpu and --gpu-workers" in refusal(*start, "--gpu-workers", "1", "--gpu", "webgpu:0")
    assert "--gpu-memory needs --gpu" in refusal(*start, "--gpu-memory", "1000")


def test_a_gpu_that_has_no_room_for_its_stage_ends_up_with_the_figures(tiny_model: Path) -> None:
    """What never can work is not begun again and again, although CPUs serve."""
    done = run_command("up", "--model", tiny_model, "--port", "0", "--gpu", "cpu", "--gpu-memory", "1000")
    assert done.returncode == 2, done
    assert "raise --gpu-memory" in done.stderr.splitlines()[-1] and "starting it again" not in done.stderr


def test_a_wrong_password_is_one_line(tiny_model: Path, own_redis: RedisServer) -> None:
    url = f"unix://someone:x@{own_redis.socket}"
    line = refusal("up", "--model", str(tiny_model), "--port", "0", "--redis", url)
    assert line.startswith("blockrelay: the control Redis does not let us in")


def test_a_failing_gpu_worker_hands_its_block_to_the_cpu_and_the_answer_says_so(tiny_model: Path) -> None:
    with running_up(tiny_model, "--stages", "2") as up:
        undisturbed = up.tokens()
        assert up.stop() == 0
    with running_up(tiny_model, "--stages", "2") as up:
        with failing_gpus(up, tiny_model, 2, after=3):
            answer = up.complete()
        assert up.stop() == 0
    assert answer["choices"][0]["token_ids"] == undisturbed
    events = answer["fallback_events"]
    assert 1 <= len(events) <= 2, "a stage that fails moves, and no other"
    assert {(event["from"], event["to"], event["success"]) for event in events} == {("GPU", "CPU", True)}


def test_somebody_elses_redis_is_waited_for_and_left_as_it_is(tiny_model: Path, own_redis: RedisServer) -> None:
    own_redis.kill()
    argv = [*COMMAND, "up", "--model", str(tiny_model), "--port", "0", "--redis", own_redis.url]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            wait_until(lambda: len(children.read_text().split()) == 3, "scheduler, worker and gateway are there")
            own_redis.start()
            up = UpProcess(process, None)
            assert len(up.tokens()) == 40
            assert all("-m blockrelay_" in command for command in up.children().values()), "none is a Redis server"
            assert up.stop() == 0
            assert process.stderr is not None and "give --payload-redis" in process.stderr.read()
        finally:
            process.kill()
    client = own_redis.client()
    keys = Keys("c0")
    assert client.ping() and not client.zcard(keys.workers) and not client.zcard(keys.running)
    client.close()
