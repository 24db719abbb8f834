"""Whatever is wrong with a request, the answer names it and nothing enters the queue."""

import base64
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.keys import Keys
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.api import reading
from tests.support.gateway.played import PlayedWorker, RunningGateway, running_gateway
from tests.support.redis.redis_server import RedisServer


@pytest.fixture(scope="module")
def gateway(folder: BlockFolder, shared_redis: RedisServer) -> Iterator[RunningGateway]:
    """One for all tests here: nothing they send gets far enough to be remembered."""
    settings = GatewaySettings(model=folder.root, redis_url=shared_redis.url, cell="t", max_body_bytes=64 << 10)
    with running_gateway(settings) as running:
        yield running


@pytest.fixture(autouse=True)
def untouched_queue(client: redis.Redis, keys: Keys, worker: PlayedWorker) -> Iterator[None]:
    """No test here leaves a record, a job or a session."""
    yield
    left = [key.decode() for key in client.scan_iter("*")]  # pyright: ignore
    for kind in ("request:", "jobs:", "session:", "log:"):
        assert not [key for key in left if key.startswith(f"{{t}}:{kind}")], left
    assert client.zcard(keys.running) == 0


def ids(**fields: Any) -> dict[str, Any]:
    tensor = {"_tensor_": True, "dtype": "int64", "shape": [1, 2], "data_b64": base64.b64encode(bytes(16)).decode()}
    return {"session_id": "s", "step": 1, "input_tensors": {"input_ids": {**tensor, **fields}}}


CHAT = {"messages": [{"role": "user", "content": "x"}]}
BAD: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "an unknown field": ("/v1/completions", {"prompt": "x", "max_token": 1}, 400, "max_token"),
    "an unknown value": ("/v1/completions", {"prompt": "x", "tool_choice": "any"}, 400, "tool_choice"),
    "an unknown value of a field": ("/v1/chat/completions", {**CHAT, "modalities": ["audio"]}, 400, "modalities"),
    "a negative max_tokens": ("/v1/completions", {"prompt": "x", "max_tokens": -5}, 400, "max_tokens"),
    "too much for the context": ("/v1/completions", {"prompt": [3] * 512}, 400, "prompt"),
    "a token id out of range": ("/v1/completions", {"prompt": [1, 99999]}, 400, "prompt"),
    "one bad prompt of several": ("/v1/completions", {"prompt": [[1], [99999]]}, 400, "prompt"),
    "an unknown model": ("/v1/completions", {"prompt": "x", "model": "gpt-4"}, 404, "model"),
    "half a surrogate pair": ("/v1/completions", {"prompt": "x\ud83d", "model": "tiny"}, 400, "prompt"),
    "an unknown model, no character": ("/v1/completions", {"prompt": "x", "model": "\ud83d"}, 404, "model"),
    "wrong base64": ("/v1/infer", ids(data_b64="%%%"), 400, "input_tensors.input_ids"),
    "a dtype outside the list": ("/v1/infer", ids(dtype="complex64"), 400, "input_tensors.input_ids"),
    "an object dtype": ("/v1/infer", ids(dtype="object"), 400, "input_tensors.input_ids"),
    "a shape that does not match": ("/v1/infer", ids(shape=[1, 3]), 400, "input_tensors.input_ids"),
    "a huge shape": ("/v1/infer", ids(shape=[1, 1 << 50]), 400, "input_tensors.input_ids"),
    "a wrong step": ("/v1/infer", {**ids(), "step": 2}, 409, "step"),
    "no step": ("/v1/infer", {**ids(), "step": None}, 400, "step"),
    "a session id with a space": ("/v1/infer", {**ids(), "session_id": "a b"}, 400, "session_id"),
    "both forms": ("/v1/infer", {**ids(), "prompt": "x"}, 400, "prompt"),
    "neither form": ("/v1/infer", {}, 400, "prompt"),
    "a text field in the tensor form": ("/v1/infer", {**ids(), "max_tokens": 5}, 400, "max_tokens"),
    "a tensor field in the text form": ("/v1/infer", {"prompt": "x", "step": 1}, 400, "step"),
    "a step beyond the context": (
        "/v1/infer", ids(shape=[1, 513], data_b64=base64.b64encode(bytes(8 * 513)).decode()), 400,
        "input_tensors.input_ids",
    ),
    "too many stop strings": ("/v1/completions", {"prompt": "x", "stop": [""] * 9000}, 400, "stop"),
    "too many stop tokens": ("/v1/completions", {"prompt": "x", "stop_token_ids": [1] * 9000}, 400, "stop_token_ids"),
    "more messages than tokens": ("/v1/chat/completions", {"messages": [1] * 513}, 400, "messages"),
    "an unknown logits": ("/v1/infer", {**ids(), "logits": "some"}, 400, "logits"),
    "a bad token in the text form": ("/v1/infer", {"prompt": [1 << 70]}, 400, "prompt"),
    "a message id over HTTP": ("/v1/infer", {"prompt": "x", "id": 1}, 400, "id"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_answered_by_the_name_of_its_field(gateway: RunningGateway, name: str) -> None:
    path, body, status, param = BAD[name]
    before = gateway.metric("blockrelay_admission_rejections_total", status=str(status))
    response = gateway.post(path, **body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.rpartition(".")[2] in error["message"]
    assert gateway.metric("blockrelay_admission_rejections_total", status=str(status)) == before + 1
    if path == "/v1/infer":
        assert response.json()["status"] == "error"
        assert response.json()["message"] == error["message"]
        named = body.get("session_id")
        assert response.json()["session_id"] == named


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"\xff", b"1" * 5000, b"[" * 20000, b'{"prompt": NaN}'])
def test_a_body_that_is_no_object_is_a_bad_request(gateway: RunningGateway, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/infer"):
        response = gateway.http.post(path, content=content)
        assert response.status_code == 400, response.text
        message = response.json()["error"]["message"]
        assert message
        if content in (b"[]", b'"x"'):
            assert message == "the body must be a JSON object"


def test_a_body_over_the_limit_is_refused_whether_it_says_its_length_or_not(gateway: RunningGateway) -> None:
    large = b'{"prompt": "' + b"x" * (70 << 10) + b'"}'

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(large), 8192):
            yield large[start : start + 8192]

    before = gateway.metric("blockrelay_admission_rejections_total", status="413")
    for content in (large, chunks()):
        response = gateway.http.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
    assert gateway.metric("blockrelay_admission_rejections_total", status="413") == before + 2


def test_a_body_far_over_the_limit_does_not_have_to_be_read(gateway: RunningGateway) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 40}\r\n\r\n{{"
    with socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2]))) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_message_over_the_limit_ends_its_socket_with_the_reason(gateway: RunningGateway) -> None:
    """Whatever of it is still on its way: a connection that were closed at once would be reset before it is read."""
    with connect(gateway.url.replace("http", "ws") + "/ws", max_size=None) as socket:
        with pytest.raises(ConnectionClosedError):
            socket.send("x" * (400 << 10))
            socket.recv(timeout=30)
        assert socket.close_code == 1009
        assert "65536" in (socket.close_reason or "")


def test_lists_are_counted_before_they_are_looked_at(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[object] = []
    monkeypatch.setattr(reading.CompletionRequest, "model_validate", looked_at.append)
    response = gateway.post("/v1/completions", prompt="x", stop=["a"] * 17)
    assert response.json()["error"]["message"] == "stop takes at most 16 strings, not 17"
    assert not looked_at


def test_a_position_that_cannot_be_is_named_as_the_client_wrote_it(gateway: RunningGateway) -> None:
    response = gateway.http.get("/v1/requests/req-" + "0" * 24 + "/events?starting_after=-1")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "starting_after"


def test_a_method_that_a_path_does_not_take_is_told_the_right_one(gateway: RunningGateway) -> None:
    response = gateway.http.get("/v1/completions")
    assert response.json()["error"]["message"] == "/v1/completions does not take GET, only POST"
    assert response.headers["allow"] == "POST"


def test_an_unknown_path_or_method_has_the_error_shape_too(gateway: RunningGateway) -> None:
    for response, status in (
        (gateway.http.get("/v1/nothing"), 404),
        (gateway.http.get("/v1/completions"), 405),
        (gateway.http.get("/v1/requests/nonsense"), 404),
        (gateway.http.get("/v1/requests/req-" + "0" * 24), 404),
        (gateway.http.get("/v1/requests/req-" + "0" * 24 + "/events"), 404),
        (gateway.http.get("/v1/requests/req-" + "0" * 24 + "/provenance"), 404),
        (gateway.http.delete("/v1/requests/req-" + "0" * 24), 404),
        (gateway.http.get("/v1/models/other"), 404),
    ):
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing(gateway: RunningGateway) -> None:
    def broken() -> Iterator[bytes]:
        yield b'{"prompt": "x"'
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        gateway.http.post("/v1/completions", content=broken())
    assert gateway.http.get("/livez").status_code == 200


def test_curl_may_claim_that_its_json_is_a_form(gateway: RunningGateway) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = gateway.http.post("/v1/completions", content=b'{"prompt": "x", "n": 0}', headers=headers)
    assert response.json()["error"]["param"] == "n"
