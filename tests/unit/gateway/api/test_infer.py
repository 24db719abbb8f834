"""/v1/infer: tensor steps of a session, the text form, and both over a WebSocket."""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import ClientConnection, connect

from blockrelay.protocol.encoding.request_ids import public_id
from blockrelay.protocol.messages import Claimed
from blockrelay.protocol.number import PROTOCOL
from blockrelay.protocol.tensors import decode_tensor
from blockrelay.settings import GatewaySettings
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_gateway.api.infer import handlers
from blockrelay_gateway.streaming.active_requests import lost_request_repair
from tests.support.gateway.played import NUMERICS, PlayedWorker, RunningGateway, answering, running_gateway
from tests.support.gateway.sse_client import read_events
from tests.support.waiting import wait_until

VOCAB = 512


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def tensor_body(tokens: list[int], *, step: int = 1, start: int = 0, **more: Any) -> dict[str, Any]:
    raw = base64.b64encode(np.array(tokens, dtype="<i8").tobytes()).decode()
    return {
        "session_id": "chat_001",
        "step": step,
        "input_tensors": {
            "input_ids": {"_tensor_": True, "dtype": "int64", "shape": [1, len(tokens)], "data_b64": raw},
            "attention_mask": {"_tensor_": True, "data": [1] * len(tokens)},
            "position_ids": {"_tensor_": True, "data": list(range(start, start + len(tokens)))},
        },
        **more,
    }


def rows(claimed: Claimed) -> Any:
    """Logits that tell which tokens they are of."""
    count = claimed.body.prompt.size - claimed.body.prior if claimed.body.logits == "all" else 1
    values = np.zeros((count, VOCAB), dtype=np.float32)
    values[:, 0] = claimed.body.prompt[-count:]
    values[:, 1] = 1e9
    return values


def ask(gateway: RunningGateway, pool: ThreadPoolExecutor, body: dict[str, Any]) -> "Future[httpx.Response]":
    return pool.submit(lambda: httpx.post(f"{gateway.url}/v1/infer", json=body, timeout=30))


def run_step(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor, body: dict[str, Any]
) -> tuple[dict[str, Any], Claimed]:
    waiting = ask(gateway, pool, body)
    (claimed,) = worker.claim()
    worker.finish_tensor(claimed, rows(claimed))
    response = waiting.result()
    assert response.status_code == 200, response.text
    return response.json(), claimed


def logits(answer: dict[str, Any]) -> Any:
    return decode_tensor(answer["outputs"]["logits"], param="logits", max_elements=1 << 20)


def test_a_tensor_step_answers_as_the_contract_says(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor
) -> None:
    answer, claimed = run_step(gateway, worker, pool, tensor_body([5, 6, 7]))
    assert claimed.body.prompt.tolist() == [5, 6, 7]
    assert (claimed.body.logits, claimed.body.prior, claimed.body.params["max_tokens"]) == ("last", 0, 0)
    assert answer["status"] == "success"
    assert answer["message"] == "Pipeline completed successfully"
    assert (answer["session_id"], answer["step"]) == ("chat_001", 1)
    found = logits(answer)
    assert found.shape == (1, 1, VOCAB)
    assert found.dtype == np.float16
    assert found[0, 0, :3].tolist() == [7, 65504, 0]
    assert answer["execution_times"] == {"block_1": 0.25, "block_2": 0.5}
    assert answer["execution_stats"] == {
        "gpu_blocks_executed": 0,
        "cpu_blocks_executed": 2,
        "total_fallbacks": 0,
        "successful_fallbacks": 0,
        "avg_block_time": 0.375,
        "cached_tokens": 0,
    }
    assert answer["fallback_events"] == []
    assert answer["total_pipeline_time"] > 0
    assert answer["system_fingerprint"] == NUMERICS


def test_a_session_goes_on_where_its_last_step_ended(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor
) -> None:
    run_step(gateway, worker, pool, tensor_body([5, 6, 7]))
    answer, claimed = run_step(gateway, worker, pool, tensor_body([8, 9], step=2, start=3, logits="all"))
    assert claimed.body.prompt.tolist() == [5, 6, 7, 8, 9]
    assert claimed.body.prior == 3
    assert logits(answer)[0, :, 0].tolist() == [8, 9]
    wrong = gateway.post("/v1/infer", **tensor_body([1], step=2, start=5))
    assert wrong.status_code == 409
    assert "expects step 3" in wrong.json()["message"]
    positions = gateway.post("/v1/infer", **tensor_body([1], step=3, start=4))
    assert positions.status_code == 400
    assert positions.json()["error"]["param"] == "input_tensors.position_ids"


def test_a_step_under_way_whose_session_falls_back_behind_it_is_a_conflict(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis comes back without its last writes: the step in flight, and the step before it, are gone."""
    monkeypatch.setattr(lost_request_repair, "SILENT_S", 0.1)
    known: Any = {name: worker.client.dump(name) for name in worker.client.scan_iter("*")}
    run_step(gateway, worker, pool, tensor_body([5, 6, 7]))
    waiting = ask(gateway, pool, tensor_body([8], step=2, start=3))
    worker.claim()
    worker.client.flushdb()
    for name, content in known.items():
        worker.client.restore(name, 60_000, content)
    answer = waiting.result()
    assert answer.status_code == 409, answer.text
    assert "expects step 1, not 2" in answer.json()["message"]
    assert answer.json()["error"]["param"] == "step"


def test_a_session_of_another_protocol_is_not_read(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor
) -> None:
    """Under the names of its fields the step that a client sends again would look like another one."""
    run_step(gateway, worker, pool, tensor_body([5, 6, 7]))
    (session,) = worker.client.scan_iter(worker.keys.session("*"))
    worker.client.hset(session, "v", PROTOCOL + 1)
    early = gateway.post("/v1/infer", **tensor_body([5, 6, 7]))
    assert early.status_code == 503 and f"is of protocol {PROTOCOL + 1} of the cell" in early.json()["message"]
    worker.client.hset(session, "v", PROTOCOL)
    assert ask(gateway, pool, tensor_body([5, 6, 7])).result().status_code == 200


def test_the_same_step_again_returns_the_stored_result_without_work(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor
) -> None:
    first, claimed = run_step(gateway, worker, pool, tensor_body([5, 6]))
    again = ask(gateway, pool, tensor_body([5, 6])).result().json()
    assert again["outputs"] == first["outputs"]
    worker.client.delete(worker.keys.result(claimed.request_id))
    recomputed, other = run_step(gateway, worker, pool, tensor_body([5, 6]))
    assert recomputed["outputs"] == first["outputs"]
    assert other.request_id != claimed.request_id
    run_step(gateway, worker, pool, tensor_body([7], step=2, start=2))


def test_two_clients_at_the_same_step_share_one_computation(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor
) -> None:
    one, two = ask(gateway, pool, tensor_body([5])), ask(gateway, pool, tensor_body([5]))
    (claimed,) = worker.claim()
    worker.finish_tensor(claimed, rows(claimed))
    assert one.result().json()["outputs"] == two.result().json()["outputs"]


def test_a_failed_step_may_be_sent_again(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor
) -> None:
    waiting = ask(gateway, pool, tensor_body([5, 6]))
    times = {"block_1": 0.5}
    meta = {"error": "GPU memory exhausted", "failed_block": "block_2", "execution_times": times}
    worker.say(worker.claim()[0], [], end="error", meta=meta)
    failed = waiting.result()
    assert failed.status_code == 500
    body = failed.json()
    assert body["message"] == "Pipeline failed at block_2: GPU memory exhausted"
    assert body["successful_blocks"] == ["block_1"]
    assert body["failed_blocks"] == [
        {"block_id": "block_2", "error": "GPU memory exhausted", "execution_time": 0.0, "worker": "CPU"}
    ]
    assert body["session_id"] == "chat_001"
    answer, _ = run_step(gateway, worker, pool, tensor_body([5, 6]))
    assert logits(answer)[0, 0, 0] == 6


def test_a_tensor_request_without_a_session_stands_alone(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor
) -> None:
    body = tensor_body([5, 6])
    del body["session_id"], body["step"]
    answer, _ = run_step(gateway, worker, pool, body)
    assert answer["session_id"] is None
    assert logits(answer)[0, 0, 0] == 6


def test_a_spoiled_result_is_an_error_and_not_an_answer(
    gateway: RunningGateway, worker: PlayedWorker, pool: ThreadPoolExecutor
) -> None:
    waiting = ask(gateway, pool, tensor_body([5]))
    (claimed,) = worker.claim()
    worker.client.set(worker.keys.result(claimed.request_id), b"BRRTnonsense", ex=60)
    worker.say(claimed, [], end="tensor")
    assert waiting.result().status_code == 500


def test_the_text_form_needs_no_tokenizer_on_the_clients_side(
    gateway: RunningGateway, worker: PlayedWorker, tokenizer: Tokenizer
) -> None:
    said = tokenizer.encode(" has the ball.", add_special_tokens=False)
    with answering(worker, lambda _: (said, "stop")):
        answer = gateway.post("/v1/infer", prompt="Anna", max_tokens=20, temperature=0).json()
        with gateway.http.stream("POST", "/v1/infer", json={"prompt": "Anna", "stream": True}) as response:
            events = list(read_events(response))
    assert answer["status"] == "success"
    assert answer["outputs"] == {"text": " has the ball.", "token_ids": said}
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(said)
    assert [event.data["status"] for event in events[1:-2]] == ["token"] * len(said)
    assert events[-2].data["outputs"] == answer["outputs"]


def test_the_text_form_may_run_in_the_background(gateway: RunningGateway, worker: PlayedWorker) -> None:
    response = gateway.post("/v1/infer", prompt="Anna", background=True)
    assert response.status_code == 202
    (claimed,) = worker.claim()
    assert response.json()["request_id"] == public_id(claimed.request_id, "t") == response.headers["x-request-id"]
    worker.say(claimed, [5], end="stop")
    shown = gateway.http.get(f"/v1/requests/{claimed.request_id}").json()
    assert (shown["status"], shown["token_ids"]) == ("completed", [5])


def test_logits_of_every_position_are_bounded_before_anything_is_queued(
    gateway: RunningGateway, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "MAX_RESULT_BYTES", 2 * VOCAB * 4)
    refused = gateway.post("/v1/infer", **tensor_body([5, 6, 7], logits="all"))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "logits"
    assert worker.client.zcard(worker.keys.running) == 0


@pytest.fixture(params=["/v1/infer/ws", ""], ids=["by its path", "without a path"])
def socket(gateway: RunningGateway, request: pytest.FixtureRequest) -> Iterator[ClientConnection]:
    with connect(gateway.url.replace("http", "ws") + request.param) as connection:
        yield connection


def receive(connection: ClientConnection) -> dict[str, Any]:
    return json.loads(connection.recv(timeout=20))


def test_a_socket_runs_several_requests_at_once(
    socket: ClientConnection, worker: PlayedWorker, tokenizer: Tokenizer
) -> None:
    socket.send(json.dumps({"id": "text", "prompt": "Anna", "stream": True}))
    (text,) = worker.claim()
    socket.send(json.dumps({"id": 7, **tensor_body([5, 6])}))
    (tensors,) = worker.claim()
    worker.finish_tensor(tensors, rows(tensors))
    said = tokenizer.encode(" has", add_special_tokens=False)
    answers = [receive(socket), receive(socket)]
    worker.say(text, said, end="length")
    while answers[-1].get("status") != "success" or answers[-1]["id"] != "text":
        answers.append(receive(socket))
    (done,) = [answer for answer in answers if answer["id"] == 7]
    assert done["status"] == "success"
    assert done["step"] == 1
    assert answers[-1]["outputs"] == {"text": " has", "token_ids": said}


def test_a_bad_message_is_answered_and_the_socket_stays(socket: ClientConnection, worker: PlayedWorker) -> None:
    bad: list[tuple[str, str]] = [
        ("{", "JSON"),
        ("[1]", "body"),
        (json.dumps({"id": "a", "prompt": "x", "max_tokens": -1}), "max_tokens"),
        (json.dumps({"id": "a", "prompt": "x", "nonsense": 1}), "nonsense"),
        (json.dumps({"id": "a", **tensor_body([5], step=3)}), "expects step 1"),
    ]
    for message, part in bad:
        socket.send(message)
        answer = receive(socket)
        assert answer["status"] == "error"
        assert part in answer["message"]
        assert answer.get("id") == ("a" if '"a"' in message else None)
    socket.send(json.dumps({"prompt": "x", "background": True, "seed": 5}))
    queued = receive(socket)
    assert (queued["status"], queued["seed"]) == ("queued", 5)
    assert worker.claim()


def test_a_binary_message_ends_the_socket_with_a_reason(socket: ClientConnection) -> None:
    socket.send(b"\x00")
    with pytest.raises(ConnectionClosedError) as closed:
        socket.recv(timeout=20)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1003
    assert "text" in closed.value.rcvd.reason


def test_an_error_over_a_socket_has_the_contracts_shape(socket: ClientConnection, worker: PlayedWorker) -> None:
    for stream in (True, False):
        socket.send(json.dumps({"id": 1, "prompt": "x", "stream": stream}))
        worker.say(worker.claim()[0], [], end="error", meta={"error": "NaN", "failed_block": "block_1"})
        answer = receive(socket)
        if stream:
            assert answer["status"] == "accepted"
            answer = receive(socket)
        assert answer["message"] == "Pipeline failed at block_1: NaN"
        assert answer["failed_block"] == "block_1"


def test_a_socket_says_when_the_queue_does_not_answer(settings: GatewaySettings, tmp_path: Path) -> None:
    nowhere = settings.model_copy(update={"redis_url": f"unix://{tmp_path}/none.sock"})
    with running_gateway(nowhere) as lost, connect(lost.url.replace("http", "ws") + "/ws") as connection:
        connection.send(json.dumps({"id": 1, **tensor_body([5])}))
        answer = receive(connection)
    assert (answer["id"], answer["session_id"], answer["error"]["code"]) == (1, "chat_001", "unavailable")


def test_a_socket_that_closes_cancels_what_ran_on_it(
    gateway: RunningGateway, socket: ClientConnection, worker: PlayedWorker
) -> None:
    socket.send(json.dumps({"prompt": "x"}))
    (claimed,) = worker.claim()
    socket.close()
    wait_until(lambda: b"end" in worker.record(claimed.request_id), "the request has ended")
    assert worker.record(claimed.request_id)[b"end"] == b"cancelled"
    assert gateway.metric("blockrelay_disconnected_clients_total") == 1
