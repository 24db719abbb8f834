"""Wrong base URLs, proxies' targets, compressed and badly encoded bodies: served, or refused with a remedy."""

import gzip
import json
import socket

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.support.gateway.played import PlayedWorker, RunningGateway, answering

PROMPT = json.dumps({"prompt": "é", "max_tokens": 1}, ensure_ascii=False)


def spoken(gateway: RunningGateway, head: str) -> str:
    """The first bytes of the answer to a head without a body."""
    port = int(gateway.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"{head.replace('PORT', str(port))}\r\n\r\n".encode())
        return connection.recv(1 << 16).decode()


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/completions/", "/v1/completions"),
        ("/v1/livez", "/livez"),
    ],
)
def test_a_path_of_a_wrong_base_url_is_told_the_right_one(gateway: RunningGateway, path: str, meant: str) -> None:
    response = gateway.http.post(path, json={})
    assert response.status_code == 404
    assert f"did you mean {meant}? " in response.json()["error"]["message"]


def test_a_path_that_means_nothing_gets_no_hint(gateway: RunningGateway) -> None:
    assert gateway.http.post("/v1/nothing", json={}).json()["error"]["message"] == "there is no POST /v1/nothing"


def test_the_list_of_models_may_end_in_a_slash(gateway: RunningGateway) -> None:
    assert gateway.http.get("/v1/models/").json() == gateway.http.get("/v1/models").json()


def test_a_target_may_have_scheme_and_host(gateway: RunningGateway) -> None:
    assert spoken(gateway, "GET http://127.0.0.1:PORT/v1/models?x=1 HTTP/1.1\r\nHost: ignored.example").startswith(
        "HTTP/1.1 200 "
    )
    refused = spoken(gateway, "GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost")
    assert refused.startswith("HTTP/1.1 421 "), "its host counts, not the header's"


@pytest.mark.parametrize(
    ("line", "length", "status"),
    [
        ("POST /v1/completions", 1 << 40, "413"),
        ("POST /v1//completions", 2, "404"),
        ("GET /v1/completions", 2, "405"),
        ("PUT /v1/infer", 2, "405"),
        ("POST /v1/completions", 2, "100"),
    ],
)
def test_a_body_that_is_refused_unread_is_not_asked_for(
    gateway: RunningGateway, line: str, length: int, status: str
) -> None:
    head = f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\nExpect: 100-continue"
    assert spoken(gateway, head).startswith(f"HTTP/1.1 {status} ")


@pytest.mark.parametrize("path", ["/v1/infer/wss", "/v1/completions"])
def test_a_websocket_at_a_wrong_path_is_told_the_right_ones(gateway: RunningGateway, path: str) -> None:
    with pytest.raises(InvalidStatus) as refused, connect(gateway.url.replace("http", "ws") + path):
        pass
    answer = refused.value.response
    assert answer.status_code == 404
    error = json.loads(answer.body or b"")["error"]
    assert error["message"] == f"there is no WebSocket at {path}: did you mean /v1/infer/ws?"
    assert error["code"] == "not_found"


def test_a_compressed_body_is_refused_by_name(gateway: RunningGateway) -> None:
    content, headers = gzip.compress(PROMPT.encode()), {"content-encoding": "gzip"}
    response = gateway.http.post("/v1/completions", content=content, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert "without Content-Encoding: gzip" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (PROMPT.encode("latin-1"), "is not UTF-8 text (byte 0xe9 at 12): send JSON as UTF-8"),
        (
            b'{"prompt": [' + b"9" * 50_000 + b"]}",
            "cannot be read as JSON: a whole number in it has more than 4300 digits",
        ),
        (b'{"prompt": ' + b"[" * 50_000, "cannot be read as JSON: its lists and objects are nested too deeply"),
    ],
    ids=["latin-1", "digits", "nesting"],
)
def test_what_cannot_be_read_is_told_by_its_cause(gateway: RunningGateway, content: bytes, said: str) -> None:
    """The refusal is the same for each way to read a body: at once, in a helper, and in messages."""
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/infer"):
        response = gateway.http.post(path, content=content)
        assert response.status_code == 400
        assert response.json()["error"]["message"] == f"the body {said}"
    if content.isascii():
        with connect(gateway.url.replace("http", "ws") + "/ws") as socket:
            socket.send(content.decode())
            assert json.loads(socket.recv(timeout=30))["error"]["message"] == f"the message {said}"


@pytest.mark.parametrize(
    ("number", "status"), [("2.0", 200), ("2.5", 400), ("1e400", 400), ("true", 400), ("-1.0", 400)]
)
def test_whole_numbers_may_be_written_as_floats(
    gateway: RunningGateway, worker: PlayedWorker, number: str, status: int
) -> None:
    content = f'{{"prompt": [5], "max_tokens": {number}, "stop_token_ids": [7.0], "seed": 3.0}}'
    with answering(worker, lambda claimed: ([5] * int(claimed.body.params["max_tokens"]), "length")):
        response = gateway.http.post("/v1/completions", content=content)
    assert response.status_code == status
    if status == 200:
        assert response.json()["usage"]["completion_tokens"] == 2
        assert response.json()["choices"][0]["seed"] == 3
