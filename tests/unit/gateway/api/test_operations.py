"""What operators see: readiness with its reasons, metrics, models, log lines, exit codes."""

import json
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.number import PROTOCOL
from blockrelay.protocol.served_folder import ServedFolder, folders_to_json
from blockrelay.protocol.transitions import calls
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.cells.readiness import Readiness
from tests.support.gateway.played import PlayedWorker, RunningGateway, answering, running_gateway
from tests.support.gateway.process import launch
from tests.support.redis.redis_server import RedisServer
from tests.support.scraping import assert_service_describes_itself, sampled
from tests.support.waiting import wait_until


def reasons(gateway: RunningGateway, question: str = "") -> list[str]:
    response = gateway.http.get("/readyz" + question)
    body = response.json()
    assert (response.status_code == 200) == (body["status"] == "ready") == (not body["reasons"])
    return body["reasons"]


def test_ready_means_that_a_token_can_be_produced(gateway: RunningGateway, worker: PlayedWorker) -> None:
    wait_until(lambda: reasons(gateway) == [], "it is ready")
    worker.scripts.run(calls.dead("w1", silent_s=0))
    gap = ["stage 1 (block_2 to block_2) has no live worker"]
    wait_until(lambda: reasons(gateway) == gap, "within a second or so")
    worker.register(plan=False)
    wait_until(lambda: reasons(gateway) == [], "sooner")


def test_probes_of_many_are_one_look_into_the_registry(gateway: RunningGateway, worker: PlayedWorker) -> None:
    def commands() -> int:
        return int(worker.client.info("stats")["total_commands_processed"])  # pyright: ignore

    wait_until(lambda: reasons(gateway) == [], "it is ready")
    before = commands()
    gateway.http.get("/livez")  # what goes on beside
    beside, before = commands() - before, commands()
    with ThreadPoolExecutor(8) as pool:
        probes = list(pool.map(lambda _: gateway.http.get("/readyz").status_code, range(200)))
    assert probes == [200] * 200
    assert commands() - before < 200 + 20 * beside, "three for each worker and probe would be 1,200"


def test_a_load_balancer_asks_whether_requests_are_accepted(gateway: RunningGateway, worker: PlayedWorker) -> None:
    worker.scripts.run(calls.dead("w1", silent_s=0))
    for question in ("?for=tokens", ""):
        wait_until(lambda asked=question: reasons(gateway, asked) != [], "what was known is not fresh any more")
    assert reasons(gateway, "?for=accepting") == []
    accepted = gateway.post("/v1/completions", prompt="x", background=True)
    assert accepted.status_code == 202, "it waits for a worker"
    told = gateway.http.get("/metrics/tenants").text
    assert sampled(told, "blockrelay_tenant_accepted_requests_total", tenant="ANYBODY") == 1, "without keys"
    refused = gateway.http.get("/readyz?for=fun")
    assert refused.status_code == 400 and "for" in refused.json()["error"]["message"]


def test_without_a_plan_or_a_queue_the_reason_says_so(settings: GatewaySettings, tmp_path: Path) -> None:
    with running_gateway(settings) as gateway:
        assert "no plan yet" in reasons(gateway)[0]
    nowhere = settings.model_copy(update={"redis_url": f"unix://{tmp_path}/none.sock"})
    with running_gateway(nowhere) as gateway:
        for question in ("", "?for=accepting"):
            assert reasons(gateway, question) == ["Redis does not answer"], "and not where it is"
        assert gateway.http.get("/livez").status_code == 200
        refused = gateway.post("/v1/infer", session_id="s", step=1, input_tensors={"input_ids": [5]})
        assert refused.status_code == 503
        assert refused.json()["status"] == "error"
        assert gateway.metric("blockrelay_redis_errors_total") > 0


def test_the_plan_says_who_runs_which_block_and_why(gateway: RunningGateway, worker: PlayedWorker) -> None:
    worker.scripts.run(calls.dead("w1", silent_s=0))
    found = gateway.http.get("/v1/plan").json()
    assert found["plan"] == {"block_1": "CPU", "block_2": "CPU"} and found["epoch"] == 1
    assert [(stage["blocks"], stage["class"], stage["devices"]) for stage in found["stages"]] == [
        ("1-1", "CPU", ["cpu:0"]),
        ("2-2", "CPU", []),
    ]
    assert [stage["workers"] for stage in found["stages"]] == [
        [{"id": "w0", "ready": True}],
        [{"id": "w1", "ready": False}],
    ]
    assert [stage["reason"] for stage in found["stages"]] == ["one half", "the other"]
    assert (found["object"], found["model"], found["source"]) == ("plan", "tiny", "a test")
    assert found["missing"] == ["stage 1 (block_2 to block_2) has no live worker"]


def test_the_gauges_of_the_cell_are_there_for_balancers(gateway: RunningGateway, worker: PlayedWorker) -> None:
    def told(name: str, **labels: str) -> float:
        return sampled(gateway.http.get("/metrics").text, f"blockrelay_{name}", model="tiny", **labels)

    for stage, used in enumerate((30, 60)):
        worker.scripts.run(calls.heartbeat(worker.names[stage], pages_used=used))
    for _ in range(3):
        assert gateway.post("/v1/completions", prompt=[1, 2], background=True).status_code == 202
    worker.claim(1)
    pages = int(worker.client.hget(worker.keys.worker(worker.names[1]), "pages"))  # pyright: ignore
    wait_until(lambda: told("num_requests_running") == 1, "the one that was claimed")
    assert told("num_requests_waiting") == 2 and told("kv_cache_usage_ratio") == 60 / pages
    assert told("ready", question="tokens") == told("ready", question="accepting") == 1
    worker.scripts.run(calls.dead("w1", silent_s=0))
    wait_until(lambda: told("ready", question="tokens") == 0, "a stage has nobody")
    assert told("ready", question="accepting") == 1


def test_a_scrape_does_not_wait_for_a_redis_that_is_away(settings: GatewaySettings, tmp_path: Path) -> None:
    nowhere = settings.model_copy(update={"redis_url": f"unix://{tmp_path}/none.sock"})
    with running_gateway(nowhere) as gateway:
        text = gateway.http.get("/metrics").text
    assert sampled(text, "blockrelay_ready") == 0 and 'blockrelay_ready{cell="t"' in text


def test_without_a_plan_there_is_none_to_show(settings: GatewaySettings) -> None:
    with running_gateway(settings) as gateway:
        answer = gateway.http.get("/v1/plan")
    assert answer.status_code == 503 and "no plan yet" in answer.json()["error"]["message"]


def test_the_one_model_is_listed_with_its_context(gateway: RunningGateway, folder: BlockFolder) -> None:
    (listed,) = gateway.http.get("/v1/models").json()["data"]
    assert listed == gateway.http.get("/v1/models/tiny").json()
    assert listed["id"] == "tiny"
    assert listed["max_model_len"] == folder.model.max_position
    assert listed["model_hash"] == folder.manifest.model_hash
    assert listed["ignored_defaults"] == {}


def test_the_listed_precision_is_that_in_force(gateway: RunningGateway, worker: PlayedWorker) -> None:
    def listed(path: str = "models") -> list[tuple[str | None, str | None]]:
        found = gateway.http.get(f"/v1/{path}").json()
        return [(one["precision"], one["kv_cache_layout"]) for one in found.get("data", [found])]

    assert listed() == [("fp32", "fp32")]
    other = ServedFolder(key="n" * 16, precision="w4a8", kv_cache_layout="fp16", numerics="n")
    worker.client.hset(worker.keys.worker("w1"), "folders", folders_to_json([other]))
    worker.give_folder(other.key, replaces_epoch=1)
    wait_until(lambda: listed() == [("w4a8", "fp16")], "within a second or so")
    assert listed("models/tiny") == listed("plan") == listed()
    worker.give_folder("gone", replaces_epoch=2)
    wait_until(lambda: listed() == [(None, None)], "no worker says which precision it is")
    worker.give_folder("", replaces_epoch=3)
    wait_until(lambda: listed() == [("fp32", "fp32")], "that with which services started")


def test_what_the_author_generates_with_and_we_do_not_apply_is_listed(
    settings: GatewaySettings, folder: BlockFolder, tmp_path: Path
) -> None:
    other = tmp_path / "model"
    shutil.copytree(folder.root, other)
    manifest = replace(folder.manifest, ignored_defaults={"repetition_penalty": 1.05})
    (other / "manifest.json").write_bytes(manifest.encode())
    with running_gateway(settings.model_copy(update={"model": other})) as gateway:
        (listed,) = gateway.http.get("/v1/models").json()["data"]
    assert listed["ignored_defaults"] == {"repetition_penalty": 1.05}


def test_every_instrument_of_the_gateway_is_observed(gateway: RunningGateway, worker: PlayedWorker) -> None:
    event = {
        "block_id": "block_2",
        "blocks": ["block_2"],
        "from": "GPU",
        "to": "CPU",
        "reason": "gpu_timeout",
        "error_code": "TIMEOUT",
        "success": True,
        "position": 0,
        "rows_recomputed": None,
    }
    response = gateway.post("/v1/completions", prompt=[1, 2, 3], background=True)
    assert gateway.metric("blockrelay_gateway_requests_waiting") == 1
    (claimed,) = worker.claim()
    failed = (claimed.request_id, claimed.run_id, "gpu_error")
    worker.scripts.run(calls.rerun(*failed, block="block_2", stage=1, detail="gpu_timeout", code="TIMEOUT"))
    claimed = worker.take([5])
    wait_until(lambda: gateway.metric("blockrelay_gateway_requests_running") == 1, "token 1 is there")
    assert gateway.metric("blockrelay_gateway_requests_waiting") == 0
    worker.say(claimed, [6], end="length")
    wait_until(lambda: gateway.metric("blockrelay_gateway_requests_running") == 0, "the request has ended")
    labels = {"block": "block_2", "from": "GPU", "to": "CPU", "reason": "gpu_error"}
    assert gateway.metric("blockrelay_request_fallbacks_total", **labels) == 1
    assert gateway.metric("blockrelay_finished_requests_total", finished_reason="length") == 1
    assert gateway.metric("blockrelay_prompt_tokens_total") == 3
    assert gateway.metric("blockrelay_generation_tokens_total") == 2
    for histogram in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_decode_time"):
        assert gateway.metric(f"blockrelay_{histogram}_seconds_count") == 1
    assert gateway.metric("blockrelay_request_prompt_tokens_sum") == 3
    assert gateway.metric("blockrelay_request_generation_tokens_sum") == 2
    scraped = gateway.http.get("/metrics").text
    assert "blockrelay_disconnected_clients_total" in scraped
    assert_service_describes_itself(scraped, "gateway")
    shown = gateway.http.get(f"/v1/requests/{response.json()['id']}").json()
    assert shown["fallback_events"] == [event]
    assert shown["reruns"] == 1


def test_a_request_of_another_model_of_the_cell_is_left_to_its_own_gateways(
    gateway: RunningGateway, worker: PlayedWorker
) -> None:
    name = "req-" + "a" * 24
    record: dict[Any, str] = {"v": str(PROTOCOL), "model": "another", "state": "queued"}
    worker.client.hset(worker.keys.request(name), mapping=record)
    worker.client.expire(worker.keys.request(name), 60)
    path = f"/v1/requests/{name}"
    for response in (gateway.http.get(path), gateway.http.get(path + "/events"), gateway.http.delete(path)):
        assert response.status_code == 404
        assert "does not serve" in response.json()["error"]["message"]
    assert worker.record(name) == {field.encode(): value.encode() for field, value in record.items()}
    assert not worker.client.exists(worker.keys.followers(name))


def test_the_log_tells_the_life_of_a_request_and_never_its_words(
    settings: GatewaySettings, worker: PlayedWorker
) -> None:
    with (
        structlog.testing.capture_logs() as lines,
        running_gateway(settings) as gateway,
        answering(worker, lambda _: ([5], "stop")),
    ):
        name = own_id(gateway.post("/v1/completions", prompt="a secret").headers["x-request-id"])
    # Either line may come first: the worker's answer is read beside the admission, which writes of the start.
    # On a busy machine others tell that Redis or the worker is slow.
    of_it = [line for line in lines if line.get("request_id") == name and "PIPELINE_EXECUTION" in line["event"]]
    complete, start = sorted(of_it, key=itemgetter("event"))
    assert (complete["event"], start["event"]) == ("PIPELINE_EXECUTION_COMPLETE", "PIPELINE_EXECUTION_START")
    assert start["total_blocks"] == 2 and complete["time"] > 0
    assert "secret" not in json.dumps(lines, default=str)


def test_the_log_of_a_session_step_names_session_and_step_and_what_fell_back(
    settings: GatewaySettings, worker: PlayedWorker
) -> None:
    step = {"session_id": "chat", "step": 1, "input_tensors": {"input_ids": [5, 6]}}
    with (
        structlog.testing.capture_logs() as lines,
        running_gateway(settings) as gateway,
        ThreadPoolExecutor() as pool,
    ):
        answer = pool.submit(gateway.post, "/v1/infer", **step)
        (claimed,) = worker.claim()
        worker.scripts.run(calls.rerun(claimed.request_id, claimed.run_id, "gpu_error", block="block_2", stage=1))
        (claimed,) = worker.claim()
        worker.finish_tensor(claimed, np.zeros((1, 512), np.float32))
        stats = answer.result().json()["execution_stats"]
    assert (stats["total_fallbacks"], stats["successful_fallbacks"]) == (1, 1)
    ours = {line["event"]: line for line in lines if line.get("session_id") == "chat"}
    assert set(ours) == {"PIPELINE_EXECUTION_START", "BLOCK_EXECUTION_FALLBACK", "PIPELINE_EXECUTION_COMPLETE"}
    assert {line["step"] for line in ours.values()} == {1}
    fallback = ours["BLOCK_EXECUTION_FALLBACK"]
    assert (fallback["block"], fallback["from"], fallback["to"], fallback["success"]) == ("block_2", "GPU", "CPU", True)


def test_a_gateway_says_that_it_is_ready_once_workers_are_there(
    settings: GatewaySettings, worker: PlayedWorker
) -> None:
    worker.client.delete(worker.keys.inbox("w1"))  # its second stage has nobody
    with structlog.testing.capture_logs() as lines, running_gateway(settings):
        assert not [line for line in lines if line["event"] == "NODE_READY"]
        worker.register()
        wait_until(lambda: any(line["event"] == "NODE_READY" for line in lines), "it says that it is ready")
    (ready,) = [line for line in lines if line["event"] == "NODE_READY"]
    assert ready["workers"] == {"cpu": True, "gpu": False} and ready["worker_counts"] == {"cpu": 2, "gpu": 0}


def test_prompts_are_logged_only_where_somebody_asked_for_it(settings: GatewaySettings, worker: PlayedWorker) -> None:
    asked = settings.model_copy(update={"log_prompts": True})
    with structlog.testing.capture_logs() as lines, running_gateway(asked) as gateway:
        gateway.post("/v1/completions", prompt=[7, 8], background=True)
    assert [line["prompt_token_ids"] for line in lines if line["event"] == "PIPELINE_EXECUTION_START"] == [[7, 8]]


def test_the_api_describes_itself_and_loads_nothing_from_elsewhere(gateway: RunningGateway) -> None:
    described = gateway.http.get("/openapi.json").json()
    assert "/v1/chat/completions" in described["paths"]
    assert gateway.http.get("/docs").status_code == 404


def test_a_bug_of_ours_is_an_error_in_the_usual_shape(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Readiness, "gaps", lambda _: 1 // 0)
    response = gateway.http.get("/readyz")
    assert response.status_code == 500
    assert "internal error" in response.json()["error"]["message"]
    wait_until(lambda: "ZeroDivisionError" in caplog.text, "the traceback is in the log")


def test_a_port_in_use_is_one_line_and_exit_code_2(folder: BlockFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, said = (process := launch({"model": str(folder.root), "port": str(port)})).communicate(timeout=30)
    assert process.returncode == 2
    assert said.count("\n") == 1
    assert f"127.0.0.1:{port}" in said


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"model": "/nowhere", "port": "0"}, "/nowhere"),
        pytest.param({"port": "many"}, "BLOCKRELAY_PORT", marks=pytest.mark.thorough),
    ],
)
def test_what_cannot_start_says_why_in_one_line(settings: dict[str, str], part: str) -> None:
    _, said = (process := launch(settings)).communicate(timeout=30)
    assert process.returncode == 2
    assert said.count("\n") == 1
    assert part in said


def test_the_process_serves_and_leaves_at_a_signal_with_nothing_but_json_lines(
    folder: BlockFolder, redis_server: RedisServer
) -> None:
    process = launch({"model": str(folder.root), "port": "0", "redis_url": redis_server.url, "cell": "t"})
    assert process.stderr is not None
    lines = [json.loads(process.stderr.readline())]
    while lines[-1]["event_type"] != "REDIS_CONNECTED":
        lines.append(json.loads(process.stderr.readline()))
    assert lines[0]["event_type"] == "NODE_STARTING"
    assert lines[0]["data"]["port"] > 0
    process.terminate()
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 0
    assert all(json.loads(line)["node_id"].startswith("gateway-") for line in rest.splitlines())
