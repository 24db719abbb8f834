"""A flood of requests that are refused: from some number on they are not read, and nothing but new requests suffers."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from blockrelay.auth.api_keys import Tenant, add_key
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission import refusal_budget
from blockrelay_gateway.policy import FULL_REFUSALS_AT_ONCE
from tests.support.gateway.played import PlayedWorker, RunningGateway
from tests.support.waiting import wait_until

NEW = json.dumps({"prompt": "x", "max_tokens": 8, "background": True})


@pytest.fixture(autouse=True)
def one_flood_empties_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow and busy machine one client may not be refused as often as the budget fills."""
    monkeypatch.setattr(refusal_budget, "FULL_REFUSALS_PER_S", 2.0)


@pytest.fixture
def clients(tmp_path: Path) -> dict[str, dict[str, str]]:
    file = tmp_path / "keys.json"
    names = ("ada", "bob")
    return {name: {"authorization": f"Bearer {add_key(file, Tenant(name=name, concurrency=2))}"} for name in names}


@pytest.fixture
def settings(settings: GatewaySettings, clients: dict[str, dict[str, str]], tmp_path: Path) -> GatewaySettings:
    return settings.model_copy(update={"max_in_flight": 2, "api_keys": tmp_path / "keys.json"})


def post(gateway: RunningGateway, headers: dict[str, str], content: str = NEW) -> httpx.Response:
    return gateway.http.post("/v1/completions", content=content, headers=headers)


@pytest.fixture
def kept(gateway: RunningGateway, worker: PlayedWorker, clients: dict[str, dict[str, str]]) -> Iterator[httpx.Response]:
    """An accepted request of Ada with a key, after which there is room for one more, which she takes too."""
    accepted = post(gateway, {**clients["ada"], "idempotency-key": "kept"})
    assert accepted.status_code == 202 and post(gateway, clients["ada"]).status_code == 202
    yield accepted


def flood(gateway: RunningGateway, headers: dict[str, str]) -> httpx.Response:
    """Sends requests until one is refused unread, and returns its answer."""
    before = gateway.metric("blockrelay_refused_unread_total")
    answers: list[httpx.Response] = []

    def unread() -> bool:
        answers.append(post(gateway, headers))
        assert answers[-1].status_code in (429, 503)
        return gateway.metric("blockrelay_refused_unread_total") > before

    wait_until(unread, "one is refused unread", poll_s=0)
    return answers[-1]


@pytest.mark.usefixtures("kept")
def test_a_flood_is_refused_unread_counted_and_not_logged(
    gateway: RunningGateway, clients: dict[str, dict[str, str]]
) -> None:
    with capture_logs() as logs:
        answer = flood(gateway, clients["ada"])
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert "not read" in error["message"] and "this key has 2 requests under way" in error["message"]
    refused = gateway.metric("blockrelay_admission_limited_total", limit="concurrency")
    unread = gateway.metric("blockrelay_refused_unread_total")
    assert refused - unread == sum(entry["event"] == "REQUEST_REJECTED" for entry in logs) >= FULL_REFUSALS_AT_ONCE


@pytest.mark.usefixtures("kept")
def test_other_clients_are_read_meanwhile(gateway: RunningGateway, clients: dict[str, dict[str, str]]) -> None:
    flood(gateway, clients["ada"])
    wrong = post(gateway, clients["bob"], '{"prompt": 5.5}')
    assert wrong.status_code == 400, "Bob is told what is wrong"
    assert post(gateway, clients["bob"]).json()["error"]["code"] == "overloaded"


def test_retries_looks_and_cancels_are_answered_in_a_flood(
    gateway: RunningGateway, worker: PlayedWorker, clients: dict[str, dict[str, str]], kept: httpx.Response
) -> None:
    ada, name = clients["ada"], kept.json()["id"]
    flood(gateway, ada)
    again = post(gateway, {**ada, "idempotency-key": "kept"})
    assert again.status_code == 202 and again.json()["id"] == name
    assert again.headers["idempotent-replayed"] == "true"
    resumed = post(gateway, {**ada, "idempotency-key": "kept", "last-event-id": f"{name}:0"}, '{"prompt": 5.5}')
    assert resumed.status_code == 400, "read, and told what is wrong"
    assert gateway.http.get(f"/v1/requests/{name}", headers=ada).is_success
    assert gateway.http.post(f"/v1/requests/{name}/cancel", headers=ada).is_success


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    "header", [{"idempotency-key": "unheard"}, {"last-event-id": "5"}], ids=["a key that nobody sent", "no key"]
)
def test_a_header_of_retries_is_no_way_around_if_nothing_is_there_to_resume(
    gateway: RunningGateway, clients: dict[str, dict[str, str]], header: dict[str, str]
) -> None:
    def unread() -> bool:
        before = gateway.metric("blockrelay_refused_unread_total")
        flood(gateway, clients["ada"])
        assert post(gateway, {**clients["ada"], **header}).status_code in (400, 429)
        return gateway.metric("blockrelay_refused_unread_total") == before + 2

    wait_until(unread, "the one with the header is refused unread too")


@pytest.mark.usefixtures("kept")
def test_a_large_body_is_refused_unread_and_its_client_reads_why(
    gateway: RunningGateway, clients: dict[str, dict[str, str]]
) -> None:
    """Closed before its body has come, the connection would be reset."""
    flood(gateway, clients["ada"])
    headers = {**clients["ada"], "connection": "close"}
    for _ in range(5):
        assert post(gateway, headers, json.dumps({"prompt": "x" * 400_000})).status_code in (413, 429)


@pytest.mark.usefixtures("kept")
def test_room_is_found_soon_after_a_flood(
    gateway: RunningGateway, worker: PlayedWorker, clients: dict[str, dict[str, str]]
) -> None:
    flood(gateway, clients["ada"])
    for claimed in worker.claim(2):
        worker.say(claimed, [5], end="stop")
    wait_until(lambda: post(gateway, clients["ada"]).status_code == 202, "she is read, and accepted", timeout_s=5)
