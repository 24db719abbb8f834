"""`Prefer: wait=SECONDS`: a refused request is kept until there is room, and accepted once."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from signal import SIGTERM
from typing import Any

import httpx
import pytest

from blockrelay.auth.api_keys import Tenant, add_key, remove_key
from blockrelay.protocol.messages import Claimed
from blockrelay.protocol.transitions.calls import Call
from blockrelay.redis.client import AsyncScripts
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission import refusal_budget
from blockrelay_gateway.cells import waiting_room
from tests.support.gateway.played import PlayedWorker, RunningGateway, ending_gateway, running_gateway
from tests.support.waiting import wait_until

BODY = {"prompt": "x", "max_tokens": 8, "temperature": 0}
WAIT = {"prefer": "wait=30"}
KEPT, SECONDS = "blockrelay_gateway_requests_kept", "blockrelay_gateway_request_kept_seconds_count"


@pytest.fixture
def settings(settings: GatewaySettings) -> GatewaySettings:
    """One request may be under way."""
    return settings.model_copy(update={"max_in_flight": 1})


@pytest.fixture
def later() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def running(gateway: RunningGateway, worker: PlayedWorker) -> Claimed:
    """The request that takes the only place."""
    accepted = gateway.post("/v1/completions", **BODY, background=True)
    assert accepted.status_code == 202 and "preference-applied" not in accepted.headers
    (claimed,) = worker.claim()
    return claimed


def is_kept(gateway: RunningGateway, count: int = 1) -> None:
    wait_until(lambda: gateway.metric(KEPT) == count, f"{count} requests are kept")


def finished(worker: PlayedWorker, claimed: Claimed) -> None:
    worker.say(claimed, worker.tokens[:1], end="stop")


def test_it_is_answered_as_soon_as_there_is_room(
    gateway: RunningGateway, worker: PlayedWorker, running: Claimed, later: ThreadPoolExecutor
) -> None:
    assert gateway.post("/v1/completions", **BODY).status_code == 503
    answer = later.submit(gateway.http.post, "/v1/completions", json=BODY, headers=WAIT)
    is_kept(gateway)
    assert "blockrelay_num_requests_waiting" in gateway.http.get("/metrics").text
    assert gateway.metric("blockrelay_num_requests_waiting") == 1
    assert worker.client.zcard(worker.keys.running) == 1, "it is not in the queue"
    finished(worker, running)
    finished(worker, worker.claim()[0])
    assert answer.result().status_code == 200
    assert answer.result().headers["preference-applied"] == "wait"
    assert gateway.metric(KEPT) == 0 and gateway.metric(SECONDS, outcome="accepted") == 1


@pytest.mark.parametrize("form", ["stream", "background", "infer"])
def test_every_form_of_a_text_request_may_wait(
    gateway: RunningGateway, worker: PlayedWorker, running: Claimed, later: ThreadPoolExecutor, form: str
) -> None:
    def ask() -> str:
        path = "/v1/infer" if form == "infer" else "/v1/completions"
        more = {} if form == "infer" else {form: True}
        answer = gateway.http.post(path, json=BODY | more, headers=WAIT)
        assert answer.status_code in (200, 202) and answer.headers["preference-applied"] == "wait"
        return answer.text

    answer = later.submit(ask)
    is_kept(gateway)
    finished(worker, running)
    finished(worker, worker.claim()[0])
    assert "error" not in answer.result()


def test_without_room_it_gets_the_refusal_at_the_end_of_its_time(gateway: RunningGateway, running: Claimed) -> None:
    refused = gateway.http.post("/v1/completions", json=BODY, headers={"prefer": "wait=1"})
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert gateway.metric(SECONDS, outcome="refused") == 1
    assert gateway.metric("blockrelay_admission_limited_total", limit="in_flight") == 1, "counted once"


def leave(gateway: RunningGateway, before: int) -> None:
    """A client whose request is kept, as the next one after `before` others that left, leaves."""
    impatient = HTTPConnection(gateway.url.removeprefix("http://"))
    impatient.request("POST", "/v1/completions", json.dumps(BODY), WAIT)
    is_kept(gateway)
    impatient.close()
    wait_until(lambda: gateway.metric(SECONDS, outcome="left") == before + 1, "it is kept no longer")


def test_it_ends_with_its_client(gateway: RunningGateway, worker: PlayedWorker, running: Claimed) -> None:
    leave(gateway, 0)
    finished(worker, running)
    assert gateway.metric(KEPT) == 0 and worker.client.zcard(worker.keys.running) == 0


def test_clients_that_leave_again_and_again_count_as_refused(
    gateway: RunningGateway, running: Claimed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_budget, "FULL_REFUSALS_AT_ONCE", 3.0)
    monkeypatch.setattr(refusal_budget, "FULL_REFUSALS_PER_S", 0.01)
    monkeypatch.setattr(refusal_budget, "LEAST_FULL_REFUSALS_PER_S", 0.01)
    for before in range(3):
        leave(gateway, before)
    assert gateway.http.post("/v1/completions", json=BODY, headers=WAIT).status_code == 503
    assert gateway.metric("blockrelay_refused_unread_total") == 1


def test_a_key_is_accepted_once_however_often_it_waits(
    gateway: RunningGateway, worker: PlayedWorker, running: Claimed, later: ThreadPoolExecutor
) -> None:
    headers = {**WAIT, "idempotency-key": "once"}
    answers = [later.submit(gateway.http.post, "/v1/completions", json=BODY, headers=headers) for _ in range(3)]
    is_kept(gateway, 3)
    finished(worker, running)
    (claimed,) = worker.claim()
    is_kept(gateway, 0)
    finished(worker, claimed)
    texts = {answer.result().text for answer in answers}
    assert len(texts) == 1 and [answer.result().status_code for answer in answers] == [200] * 3
    assert worker.client.hget(worker.keys.totals(worker.model), "accepted") == b"2"


@pytest.mark.parametrize(("priorities", "order"), [((0, 0, 0), [0, 1, 2]), ((50, 0, 20), [1, 2, 0])])
def test_they_are_accepted_by_priority_and_then_as_they_came(
    gateway: RunningGateway,
    worker: PlayedWorker,
    running: Claimed,
    later: ThreadPoolExecutor,
    priorities: tuple[int, ...],
    order: list[int],
) -> None:
    answers: list[Future[httpx.Response]] = []
    for number, priority in enumerate(priorities):
        body = BODY | {"background": True, "priority": priority, "max_tokens": 2 + number}
        answers.append(later.submit(gateway.http.post, "/v1/completions", json=body, headers=WAIT))
        is_kept(gateway, number + 1)
    found: list[int] = []
    for _ in priorities:
        finished(worker, running)
        (running,) = worker.claim()
        found.append(running.body.params["max_tokens"] - 2)
    assert found == order and all(answer.result().status_code == 202 for answer in answers)


def test_several_prompts_are_never_kept(settings: GatewaySettings, running: Claimed) -> None:
    with running_gateway(settings.model_copy(update={"max_in_flight": 2})) as gateway:
        assert gateway.http.post("/v1/completions", json=BODY | {"prompt": ["x", "y"]}, headers=WAIT).status_code == 503
        assert gateway.metric(SECONDS, outcome="refused") == 0


def test_its_timeout_begins_when_it_came(
    gateway: RunningGateway, worker: PlayedWorker, running: Claimed, later: ThreadPoolExecutor
) -> None:
    body = BODY | {"background": True, "timeout": 60}
    answer = later.submit(gateway.http.post, "/v1/completions", json=body, headers=WAIT)
    is_kept(gateway)
    began = gateway.cell.state.now_ms()
    finished(worker, running)
    (claimed,) = worker.claim()
    deadline = int(worker.record(claimed.request_id)[b"deadline_ms"])
    assert answer.result().status_code == 202 and deadline <= began + 60_000


def test_it_waits_no_longer_than_its_timeout(gateway: RunningGateway, running: Claimed) -> None:
    refused = gateway.http.post("/v1/completions", json=BODY | {"timeout": 1}, headers=WAIT)
    assert refused.status_code == 503 and gateway.metric(SECONDS, outcome="refused") == 1


def test_it_is_not_accepted_behind_its_timeout(
    gateway: RunningGateway,
    worker: PlayedWorker,
    running: Claimed,
    later: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is room when its time is over; until then it stood behind one whose ACCEPT takes its time."""
    run, holding, held, go_on = AsyncScripts.run, threading.Event(), threading.Event(), threading.Event()

    async def slow(self: AsyncScripts, call: Call[Any], **how: Any) -> Any:
        if call.script == "accept" and call.arguments["max_tokens"] == 9 and holding.is_set():
            held.set()
            await asyncio.to_thread(go_on.wait)
        return await run(self, call, **how)

    monkeypatch.setattr(AsyncScripts, "run", slow)
    first = later.submit(gateway.http.post, "/v1/completions", json=BODY | {"max_tokens": 9}, headers=WAIT)
    is_kept(gateway)
    holding.set()
    assert held.wait(30)
    headers = {**WAIT, "idempotency-key": "late"}
    late = later.submit(gateway.http.post, "/v1/completions", json=BODY | {"timeout": 1}, headers=headers)
    is_kept(gateway, 2)
    finished(worker, running)
    assert late.result().status_code == 503
    go_on.set()
    finished(worker, worker.claim()[0])
    assert first.result().status_code == 200


def test_one_whose_client_leaves_while_it_is_accepted_is_cancelled(
    gateway: RunningGateway, worker: PlayedWorker, running: Claimed, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, accepted, gone = AsyncScripts.run, threading.Event(), threading.Event()

    async def slow(self: AsyncScripts, call: Call[Any], **how: Any) -> Any:
        answer = await run(self, call, **how)
        if call.script == "accept" and answer.status == "OK":
            accepted.set()
            await asyncio.to_thread(gone.wait)
        return answer

    monkeypatch.setattr(AsyncScripts, "run", slow)
    impatient = HTTPConnection(gateway.url.removeprefix("http://"))
    impatient.request("POST", "/v1/completions", json.dumps(BODY), {**WAIT, "idempotency-key": "left"})
    is_kept(gateway)
    finished(worker, running)
    assert accepted.wait(30)
    impatient.close()
    (claimed,) = worker.claim()
    gone.set()
    wait_until(lambda: worker.record(claimed.request_id).get(b"end") == b"cancelled", "it is cancelled")
    assert gateway.metric(KEPT) == 0


def test_one_that_another_gateway_has_accepted_is_found(
    gateway: RunningGateway,
    worker: PlayedWorker,
    settings: GatewaySettings,
    running: Claimed,
    later: ThreadPoolExecutor,
) -> None:
    first = later.submit(gateway.http.post, "/v1/completions", json=BODY, headers=WAIT)
    is_kept(gateway)
    keyed = BODY | {"background": True}
    behind = later.submit(
        gateway.http.post, "/v1/completions", json=keyed, headers={"prefer": "wait=2", "idempotency-key": "elsewhere"}
    )
    is_kept(gateway, 2)
    with running_gateway(settings.model_copy(update={"max_in_flight": 9})) as other:
        there = other.http.post("/v1/completions", json=keyed, headers={"idempotency-key": "elsewhere"})
    assert there.status_code == 202
    assert behind.result().status_code == 202 and behind.result().json()["id"] == there.json()["id"]
    for claimed in (running, *worker.claim()):
        finished(worker, claimed)
    finished(worker, worker.claim()[0])
    assert first.result().status_code == 200


def test_a_gateway_that_ends_refuses_what_it_keeps(settings: GatewaySettings, worker: PlayedWorker) -> None:
    with ThreadPoolExecutor(1) as later, ending_gateway(settings) as gateway:
        assert gateway.post("/v1/completions", **BODY, background=True).status_code == 202
        answer = later.submit(gateway.http.post, "/v1/completions", json=BODY, headers=WAIT)
        is_kept(gateway)
        gateway.tell(SIGTERM)
        assert answer.result().status_code == 503


def test_a_gateway_keeps_no_more_than_it_has_places(
    gateway: RunningGateway, running: Claimed, later: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_room, "KEPT_PLACES", 1)
    first = later.submit(gateway.http.post, "/v1/completions", json=BODY, headers={"prefer": "wait=2"})
    is_kept(gateway)
    assert gateway.http.post("/v1/completions", json=BODY, headers=WAIT).status_code == 503
    assert not first.done()
    first.result()


class TestKeys:
    """Clients with keys of their own."""

    @pytest.fixture
    def clients(self, tmp_path: Path) -> dict[str, dict[str, str]]:
        file = tmp_path / "keys.json"
        return {
            name: {"authorization": f"Bearer {add_key(file, Tenant(name=name, concurrency=1))}", **WAIT}
            for name in ("ada", "bob")
        }

    @pytest.fixture
    def settings(
        self, settings: GatewaySettings, clients: dict[str, dict[str, str]], tmp_path: Path
    ) -> GatewaySettings:
        return settings.model_copy(update={"max_in_flight": 9, "api_keys": tmp_path / "keys.json"})

    def test_one_that_waits_for_itself_does_not_keep_another_out(
        self,
        gateway: RunningGateway,
        worker: PlayedWorker,
        clients: dict[str, dict[str, str]],
        later: ThreadPoolExecutor,
    ) -> None:
        body = BODY | {"background": True}
        assert gateway.http.post("/v1/completions", json=body, headers=clients["ada"]).status_code == 202
        (running,) = worker.claim()
        waits = later.submit(gateway.http.post, "/v1/completions", json=body, headers=clients["ada"])
        is_kept(gateway)
        assert gateway.http.post("/v1/completions", json=body, headers=clients["bob"]).status_code == 202
        finished(worker, running)
        assert waits.result().status_code == 202

    def test_one_may_have_half_of_the_places(
        self,
        gateway: RunningGateway,
        clients: dict[str, dict[str, str]],
        later: ThreadPoolExecutor,
        monkeypatch: pytest.MonkeyPatch,
        worker: PlayedWorker,
    ) -> None:
        monkeypatch.setattr(waiting_room, "KEPT_PLACES", 3)
        body = BODY | {"background": True}
        for name in clients:
            assert gateway.http.post("/v1/completions", json=body, headers=clients[name]).status_code == 202
        impatient = {"prefer": "wait=2"}
        ada = [
            later.submit(gateway.http.post, "/v1/completions", json=body, headers=clients["ada"] | impatient)
            for _ in range(3)
        ]
        wait_until(lambda: sum(one.done() for one in ada) == 1, "one of three is refused at once")
        is_kept(gateway, 2)
        bob = later.submit(gateway.http.post, "/v1/completions", json=body, headers=clients["bob"] | impatient)
        is_kept(gateway, 3)
        assert [one.result().status_code for one in (*ada, bob)] == [429] * 4

    def test_a_removed_key_waits_no_longer(
        self,
        gateway: RunningGateway,
        clients: dict[str, dict[str, str]],
        later: ThreadPoolExecutor,
        tmp_path: Path,
        worker: PlayedWorker,
    ) -> None:
        body = BODY | {"background": True}
        assert gateway.http.post("/v1/completions", json=body, headers=clients["ada"]).status_code == 202
        waits = later.submit(gateway.http.post, "/v1/completions", json=body, headers=clients["ada"])
        is_kept(gateway)
        remove_key(tmp_path / "keys.json", "ada")
        assert waits.result().status_code == 401
