"""Wrong base URLs, proxies' targets, compressed and badly encoded bodies: served, or refused with a remedy."""

import gzip
import json
import socket

import pytest

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
        ("POST /v1/completions", 2, "100"),
    ],
)
def test_a_body_that_is_refused_unread_is_not_asked_for(
    gateway: RunningGateway, line: str, length: int, status: str
) -> None:
    head = f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\nExpect: 100-continue"
    assert spoken(gateway, head).startswith(f"HTTP/1.1 {status} ")


def test_a_compressed_body_is_refused_by_name(gateway: RunningGateway) -> None:
    content, headers = gzip.compress(PROMPT.encode()), {"content-encoding": "gzip"}
    response = gateway.http.post("/v1/completions", content=content, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert "without Content-Encoding: gzip" in response.json()["error"]["message"]


def test_a_body_that_is_not_utf_8_is_told_so(gateway: RunningGateway) -> None:
    for path in ("/v1/completions", "/v1/infer"):
        response = gateway.http.post(path, content=PROMPT.encode("latin-1"))
        assert response.status_code == 400
        assert "UTF-8" in response.json()["error"]["message"]


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
