"""API keys: who is let in, and that one tenant sees nothing of another's."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets.sync.client as websockets
from websockets.exceptions import ConnectionClosed, InvalidStatus

from blockrelay.auth.api_keys import Tenant, add_key, remove_key
from blockrelay.errors import UsageError
from blockrelay.settings import GatewaySettings
from blockrelay_gateway import policy
from blockrelay_gateway.app import create_app
from tests.support.gateway.played import PlayedWorker, RunningGateway
from tests.support.waiting import wait_until


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def ada(file: Path) -> dict[str, str]:
    return {"authorization": f"Bearer {add_key(file, Tenant(name='ada'))}"}


@pytest.fixture
def bob(file: Path) -> dict[str, str]:
    return {"authorization": f"Bearer {add_key(file, Tenant(name='bob'))}"}


@pytest.fixture
def settings(settings: GatewaySettings, file: Path, ada: dict[str, str], bob: dict[str, str]) -> GatewaySettings:
    return settings.model_copy(update={"api_keys": file})


def send(gateway: RunningGateway, path: str, headers: dict[str, str], **body: Any) -> httpx.Response:
    return gateway.http.post(path, content=json.dumps(body), headers=headers)


def queued(gateway: RunningGateway, headers: dict[str, str], **body: Any) -> str:
    answer = send(gateway, "/v1/completions", headers, prompt="x", background=True, **body)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", "Bearer br-x br-x", "Basic YTpi", "br-x", "Bearer \xff\xfe", "bearer null"],
)
def test_without_a_known_key_nothing_is_told(gateway: RunningGateway, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    for method, path in [
        ("POST", "/v1/completions"),
        ("POST", "/v1/infer"),
        ("GET", "/v1/models"),
        ("GET", "/v1/requests/req-" + 24 * "0"),
        ("GET", "/no/such/path"),
    ]:
        refused = gateway.http.request(method, path, headers=headers)  # pyright: ignore[reportArgumentType]
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        error = refused.json()["error"]
        assert error["code"] == "invalid_api_key" and error["type"] == "invalid_request_error"
    assert gateway.metric("blockrelay_admission_rejections_total", status="401") == 2


def test_health_and_metrics_need_no_key(gateway: RunningGateway, worker: PlayedWorker) -> None:
    wait_until(lambda: gateway.http.get("/readyz").status_code == 200, "the look at the cell before is forgotten")
    for path in ("/livez", "/metrics", "/openapi.json", "/"):
        assert gateway.http.get(path).status_code == 200


def test_a_known_key_gets_in(gateway: RunningGateway, ada: dict[str, str], worker: PlayedWorker) -> None:
    assert gateway.http.get("/v1/models", headers=ada).status_code == 200
    queued(gateway, ada)
    (claimed,) = worker.claim()
    assert worker.record(claimed.request_id)[b"tenant"] == b"ada"


def test_the_body_of_a_stranger_is_not_read(gateway: RunningGateway) -> None:
    refused = gateway.http.post("/v1/completions", content=b"x" * (1 << 20))
    assert refused.status_code == 401


def test_requests_of_others_do_not_exist(
    gateway: RunningGateway, ada: dict[str, str], bob: dict[str, str], worker: PlayedWorker
) -> None:
    name = queued(gateway, ada)
    unknown = "cmpl-" + 24 * "0"
    for call in (
        lambda n, h: gateway.http.get(f"/v1/requests/{n}", headers=h),
        lambda n, h: gateway.http.get(f"/v1/requests/{n}/events", headers=h),
        lambda n, h: gateway.http.delete(f"/v1/requests/{n}", headers=h),
        lambda n, h: gateway.http.post(f"/v1/requests/{n}/cancel", headers=h),
    ):  # fmt: skip
        theirs, none = call(name, bob), call(unknown, bob)
        assert theirs.status_code == none.status_code == 404

        def plain(answer: httpx.Response) -> str:
            return re.sub(r"(req|cmpl)-(t-)?[0-9a-f]{24}", "ID", answer.text)

        assert plain(theirs) == plain(none), "the answer tells that there is such a request"
    assert gateway.http.get(f"/v1/requests/{name}", headers=ada).json()["status"] == "queued"
    worker.take([5], end="stop")
    assert gateway.http.get(f"/v1/requests/{name}", headers=ada).json()["status"] == "completed"
    assert gateway.http.get(f"/v1/requests/{name}/events", headers=ada).status_code == 200
    assert gateway.http.get(f"/v1/requests/{name}/events", headers=bob).status_code == 404
    assert gateway.http.get(f"/v1/requests/{name}/provenance", headers=bob).status_code == 404


def test_kv_pages_are_shared_with_nobody(
    gateway: RunningGateway, ada: dict[str, str], bob: dict[str, str], worker: PlayedWorker
) -> None:
    for headers in (ada, bob):
        for salt in ({}, {"cache_salt": "s"}):
            queued(gateway, headers, **salt)
    salts = {claimed.body.salt for claimed in worker.claim(4)}
    assert len(salts) == 4 and "" not in salts and "s" not in salts
    refused = send(gateway, "/v1/completions", bob, prompt="x", cache_salt="ada\0s")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"


def test_sessions_of_equal_names_are_different(
    gateway: RunningGateway, ada: dict[str, str], bob: dict[str, str], worker: PlayedWorker
) -> None:
    tensors = {"input_ids": {"_tensor_": True, "data": [[1, 2, 3]]}}
    body = {"session_id": "s", "step": 1, "input_tensors": tensors, "timeout": 0.3}
    for headers in (ada, bob):
        assert send(gateway, "/v1/infer", headers, **body).status_code == 504, "the same step of another session"
    sessions = {key.decode() for key in worker.client.keys("*session*")}  # pyright: ignore
    assert sessions == {worker.keys.session("ada/s"), worker.keys.session("bob/s")}
    wrong = send(gateway, "/v1/infer", ada, **{**body, "step": 7})
    assert wrong.status_code == 409 and "session 's'" in wrong.json()["message"]


@pytest.mark.parametrize("path", ["/v1/infer/ws", "/ws", "/", ""])
def test_a_web_socket_needs_a_key(
    gateway: RunningGateway, ada: dict[str, str], worker: PlayedWorker, path: str
) -> None:
    address = gateway.url.replace("http", "ws") + path
    with pytest.raises(InvalidStatus) as refused:
        websockets.connect(address)
    assert refused.value.response.status_code == 401
    with websockets.connect(address, additional_headers=ada) as socket:
        socket.send(json.dumps({"prompt": "x", "background": True}))
        assert json.loads(socket.recv(timeout=10))["status"] == "queued"
    (claimed,) = worker.claim()
    assert worker.record(claimed.request_id)[b"tenant"] == b"ada"


def test_a_changed_file_counts_at_once_and_a_broken_one_changes_nothing(
    gateway: RunningGateway, file: Path, ada: dict[str, str], bob: dict[str, str]
) -> None:
    def status(headers: dict[str, str]) -> int:
        return gateway.http.get("/v1/models", headers=headers).status_code

    remove_key(file, "ada")
    assert (status(ada), status(bob)) == (401, 200)
    eve = {"authorization": f"Bearer {add_key(file, Tenant(name='eve'))}"}
    assert status(eve) == 200
    good = file.read_text()
    file.write_text("{")
    assert (status(ada), status(bob)) == (401, 200)
    file.unlink()
    assert (status(ada), status(bob)) == (401, 200)
    file.write_text(good.replace('"eve"', '"eva"'))
    wait_until(lambda: status(eve) == 200, "the mended file is read")


@pytest.fixture
def looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "KEY_CHECK_S", 0.05)


def test_a_removed_key_is_refused_on_its_open_socket(
    gateway: RunningGateway, worker: PlayedWorker, file: Path, ada: dict[str, str]
) -> None:
    address = gateway.url.replace("http", "ws") + "/v1/infer/ws"
    with websockets.connect(address, additional_headers=ada) as socket:
        remove_key(file, "ada")
        add_key(file, Tenant(name="ada"))  # another key of the same name is another key
        socket.send(json.dumps({"id": 1, "prompt": "x", "background": True}))
        answer = json.loads(socket.recv(timeout=10))
    assert (answer["id"], answer["error"]["code"]) == (1, "invalid_api_key")
    assert worker.client.zcard(worker.keys.running) == 0


def test_the_socket_of_a_removed_key_is_closed_when_what_was_accepted_is_answered(
    gateway: RunningGateway, worker: PlayedWorker, file: Path, ada: dict[str, str], looked_at_often: None
) -> None:
    address = gateway.url.replace("http", "ws") + "/v1/infer/ws"
    with (
        websockets.connect(address, additional_headers=ada) as idle,
        websockets.connect(address, additional_headers=ada) as busy,
    ):
        busy.send(json.dumps({"id": 1, "prompt": [3], "max_tokens": 1}))
        (claimed,) = worker.claim()
        remove_key(file, "ada")
        with pytest.raises(ConnectionClosed) as closed:
            idle.recv(timeout=10)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
        worker.say(claimed, [5], end="length")
        assert json.loads(busy.recv(timeout=10))["status"] == "success"
        with pytest.raises(ConnectionClosed):
            busy.recv(timeout=10)


def test_limits_hold_on_open_sockets_from_the_next_message_on(
    gateway: RunningGateway, worker: PlayedWorker, file: Path, ada: dict[str, str]
) -> None:
    address = gateway.url.replace("http", "ws") + "/v1/infer/ws"
    with websockets.connect(address, additional_headers=ada) as socket:
        for limit, status in ((None, "queued"), (3, "error")):
            keys = json.loads(file.read_text())
            for key in keys["keys"] if limit else ():
                key["tokens_per_minute"] = limit
            file.write_text(json.dumps(keys))
            socket.send(json.dumps({"prompt": [3], "max_tokens": 20, "background": True}))
            assert json.loads(socket.recv(timeout=10))["status"] == status


def test_the_status_stream_of_a_removed_key_ends(
    gateway: RunningGateway, file: Path, ada: dict[str, str], looked_at_often: None
) -> None:
    with gateway.http.stream("GET", "/v1/status/events", headers=ada) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("retry:")
        remove_key(file, "ada")
        assert any("invalid_api_key" in line for line in lines), "and then it ends"


def test_keys_are_in_no_log(
    gateway: RunningGateway, ada: dict[str, str], capfd: pytest.CaptureFixture[str], worker: PlayedWorker
) -> None:
    queued(gateway, ada)
    gateway.http.get("/v1/models", headers={"authorization": "Bearer br-some-secret"})
    out, err = capfd.readouterr()
    assert ada["authorization"].split()[1] not in out + err and "br-some-secret" not in out + err


def test_a_gateway_does_not_start_without_its_file(settings: GatewaySettings, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        create_app(settings.model_copy(update={"api_keys": tmp_path / "none.json"}))
