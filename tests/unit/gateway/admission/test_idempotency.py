"""Idempotency-Key: the same POST again finds the same requests, whatever became of the first one."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from websockets.sync.client import connect

from blockrelay.protocol.encoding.request_ids import own_id, sibling
from blockrelay.protocol.messages import Claimed
from blockrelay.protocol.sampling_params import derive_seed
from blockrelay.settings import GatewaySettings
from tests.support.cell import begin_cell
from tests.support.gateway.played import PlayedWorker, RunningGateway, answering, running_gateway
from tests.support.gateway.sse_client import Event, read_events
from tests.support.gateway.streams import TEXT
from tests.support.waiting import wait_until

KEY = {"Idempotency-Key": "a key of mine"}
BODY: dict[str, Any] = {"prompt": "Anna", "max_tokens": 20}


def post(gateway: RunningGateway, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return gateway.http.post(path, json=body or BODY, headers=KEY)


@contextmanager
def streaming(gateway: RunningGateway, after: str | None = None, **body: Any) -> Iterator[httpx.Response]:
    headers = KEY if after is None else {**KEY, "Last-Event-ID": after}
    body = {**BODY, **body, "stream": True}
    with (
        httpx.Client(base_url=gateway.url, timeout=30) as http,  # a connection of its own
        http.stream("POST", "/v1/completions", json=body, headers=headers) as response,
    ):
        yield response


def pairs(events: list[Event]) -> list[tuple[str | None, Any]]:
    return [(event.id, event.data) for event in events]


def queued(worker: PlayedWorker) -> int:
    return int(worker.client.zcard(worker.keys.running))  # pyright: ignore[reportArgumentType]


def test_the_same_post_again_is_the_same_answer(gateway: RunningGateway, worker: PlayedWorker) -> None:
    seen: list[Claimed] = []

    def reply(claimed: Claimed) -> tuple[list[int], str]:
        seen.append(claimed)
        return worker.tokens, "stop"

    with answering(worker, reply):
        first, second = post(gateway), post(gateway)
        with streaming(gateway) as response:
            streamed = list(read_events(response))
    assert len(seen) == 1
    assert first.json() == second.json() and first.headers["x-request-id"] == second.headers["x-request-id"]
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == response.headers["idempotent-replayed"] == "true"
    assert "".join(event.data["choices"][0]["text"] for event in streamed[:-1]) == TEXT
    assert seen[0].body.params["seed"] == derive_seed(seen[0].request_id), (
        "so that a lost request gives the same tokens"
    )


def test_the_name_and_the_seed_outlive_the_retention(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with answering(worker, lambda _: ([5], "stop")):
        first = post(gateway).json()
        begin_cell(worker.client, worker.keys)
        worker.register()
        again = post(gateway)
    assert "idempotent-replayed" not in again.headers
    assert (again.json()["id"], again.json()["choices"][0]["seed"]) == (first["id"], first["choices"][0]["seed"])


def test_it_is_kept_for_a_time_of_its_own(settings: GatewaySettings, worker: PlayedWorker) -> None:
    kept = settings.model_copy(update={"keyed_retention_s": 7777})
    with running_gateway(kept) as gateway, answering(worker, lambda _: ([5], "stop")):
        name = own_id(post(gateway).headers["x-request-id"])
    assert 7700 < worker.client.ttl(worker.keys.request(name)) <= 7777  # pyright: ignore


def test_a_stream_is_attached_to_and_goes_on_behind_any_event(
    gateway: RunningGateway, settings: GatewaySettings, worker: PlayedWorker
) -> None:
    with running_gateway(settings) as other, streaming(gateway, stream_options={"include_usage": True}) as first:
        claimed = worker.take(worker.tokens[:3])
        here = read_events(first)
        started = [next(here) for _ in range(3)]
        with streaming(other, stream_options={"include_usage": True}) as second:
            worker.say(claimed, worker.tokens[3:], end="stop")
            whole = list(read_events(second))
        assert pairs(started + list(here)) == pairs(whole)
        for at, event in enumerate(whole[:-1]):
            with streaming(other, after=event.id, stream_options={"include_usage": True}) as rest:
                assert pairs(list(read_events(rest))) == pairs(whole[at + 1 :])


def test_ten_clients_at_once_are_one_request(
    gateway: RunningGateway, settings: GatewaySettings, worker: PlayedWorker
) -> None:
    start = threading.Barrier(10)

    def run(at: RunningGateway) -> tuple[list[tuple[str | None, Any]], bool]:
        start.wait()
        with streaming(at) as response:
            return pairs(list(read_events(response))), "idempotent-replayed" in response.headers

    with running_gateway(settings) as other, ThreadPoolExecutor(10) as pool:
        streams = [pool.submit(run, at) for at in (gateway, other) * 5]
        (claimed,) = worker.claim()
        for token in worker.tokens:
            worker.say(claimed, [token])
        worker.say(claimed, [], end="length")
        results = [stream.result() for stream in streams]
    assert all(events == results[0][0] for events, _ in results) and len(results[0][0]) == len(worker.tokens) + 2
    assert sum(not replayed for _, replayed in results) == 1
    assert queued(worker) == 0


def test_another_body_under_the_same_key_is_refused(gateway: RunningGateway, worker: PlayedWorker) -> None:
    assert post(gateway, **BODY, background=True).status_code == 202
    for path, body in (
        ("/v1/completions", {**BODY, "max_tokens": 21, "background": True}),
        ("/v1/completions", {**BODY, "prompt": ["Anna", "Tom"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Anna"}]}),
        ("/v1/infer", {**BODY, "background": True}),
    ):
        refused = post(gateway, path, **body)
        assert refused.status_code == 422, body
        assert refused.json()["error"]["code"] == "idempotency_key_reused"
        assert "new key" in refused.json()["error"]["message"]
    assert queued(worker) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/infer"])
@pytest.mark.parametrize("key", [b"", b"x" * 256, b"\xe4"])
def test_a_key_that_is_none_is_refused(gateway: RunningGateway, worker: PlayedWorker, path: str, key: bytes) -> None:
    refused = gateway.http.post(path, json={"prompt": "x"}, headers={b"Idempotency-Key": key})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "Idempotency-Key"
    assert queued(worker) == 0


def test_an_event_of_another_request_is_no_place_to_go_on(gateway: RunningGateway, worker: PlayedWorker) -> None:
    for after in ("req-" + "0" * 24 + ":3", "nonsense", "1.2", ""):
        with streaming(gateway, after=after) as refused:
            assert json.loads(refused.read())["error"]["param"] == "Last-Event-ID"
            assert refused.status_code == 400
    whole = gateway.http.post("/v1/completions", json=BODY, headers={**KEY, "Last-Event-ID": "3"})
    assert whole.status_code == 400
    assert queued(worker) == 0


def test_a_place_beyond_the_log_waits_for_it(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with streaming(gateway, after="4") as response:
        claimed = worker.take(worker.tokens, end="stop")
        events = list(read_events(response))
    assert [event.id for event in events[:-1]] == [
        f"{worker.public(claimed)}:{at}" for at in range(5, len(worker.tokens) + 2)
    ]


def test_a_refusal_is_not_remembered(settings: GatewaySettings, worker: PlayedWorker) -> None:
    with running_gateway(settings.model_copy(update={"max_in_flight": 1})) as gateway:
        gateway.post("/v1/completions", prompt="x", background=True)
        assert post(gateway).status_code == 503
        assert post(gateway, prompt="Anna", max_tokens=0).status_code == 400
        worker.say(worker.claim()[0], [5], end="stop")
        with answering(worker, lambda _: ([5], "stop")):
            answer = post(gateway)
    assert answer.status_code == 200 and "idempotent-replayed" not in answer.headers


def test_what_is_accepted_is_answered_however_full_the_system_is(
    settings: GatewaySettings, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_gateway(settings.model_copy(update={"max_in_flight": 1})) as gateway:
        assert post(gateway, **BODY, background=True).status_code == 202
        assert post(gateway, **BODY, background=True).headers["idempotent-replayed"] == "true"
        monkeypatch.setattr(gateway.cell.state, "full", "of other things")
        assert gateway.post("/v1/completions", prompt="x").status_code == 503
        assert post(gateway, **BODY, background=True).status_code == 202


SEVERAL: dict[str, Any] = {"prompt": [[10], [20], [30]], "return_token_ids": True}


def repeat(times: int) -> Callable[[Claimed], tuple[list[int], str]]:
    """Answers every request with its first token, `times` times."""
    return lambda claimed: ([int(claimed.body.prompt[0])] * times, "length")


class TestSeveralPrompts:
    def test_all_are_found_again_and_every_event_resumes_all(
        self, gateway: RunningGateway, settings: GatewaySettings, worker: PlayedWorker
    ) -> None:
        with answering(worker, repeat(2)), streaming(gateway, **SEVERAL) as response:
            whole = list(read_events(response))
        name = whole[0].data["id"]
        with running_gateway(settings) as other:
            for at, event in enumerate(whole[:-1]):
                for method, path in (("POST", "/v1/completions"), ("GET", f"/v1/requests/{name}/events")):
                    headers = {**KEY, "Last-Event-ID": event.id or ""}
                    body = {**BODY, **SEVERAL, "stream": True} if method == "POST" else None
                    query = {"return_token_ids": True} if method == "GET" else None
                    with other.http.stream(method, path, json=body, params=query, headers=headers) as response:
                        rest = list(read_events(response))
                    assert in_any_order(rest) == in_any_order(whole[at + 1 :])
                    assert rest[-1].data == "DONE" and rest[0].id in (None, *(event.id for event in whole))
            shown = other.http.get(f"/v1/requests/{name}").json()
        assert [own_id(one) for one in shown["choices"]] == [
            sibling(own_id(shown["request_id"]), index) for index in range(3)
        ]
        assert queued(worker) == 0

    def test_those_that_a_dying_gateway_did_not_reach_are_accepted_by_the_retry(
        self, gateway: RunningGateway, worker: PlayedWorker
    ) -> None:
        with answering(worker, repeat(1)):
            first = post(gateway, **SEVERAL)
            lost = sibling(own_id(first.headers["x-request-id"]), 2)
            worker.client.delete(worker.keys.request(lost), worker.keys.log(lost))
            again = post(gateway, **SEVERAL)
        assert again.json() == first.json()
        assert "idempotent-replayed" not in again.headers, "some of it is new"

    def test_all_or_none_and_none_is_forgotten(self, settings: GatewaySettings, worker: PlayedWorker) -> None:
        with running_gateway(settings.model_copy(update={"max_in_flight": 3})) as gateway:
            assert gateway.post("/v1/completions", prompt=[40], background=True).status_code == 202
            assert post(gateway, **SEVERAL).status_code == 503
            assert queued(worker) == 1
        with running_gateway(settings) as gateway, answering(worker, repeat(1)):
            answer = post(gateway, **SEVERAL)
        assert [choice["token_ids"] for choice in answer.json()["choices"]] == [[10], [20], [30]]

    def test_delete_ends_all(self, gateway: RunningGateway, worker: PlayedWorker) -> None:
        with streaming(gateway, **SEVERAL) as response:
            name = own_id(response.headers["x-request-id"])
            assert gateway.http.delete(f"/v1/requests/{name}").json()["status"] == "cancelled"
            events = list(read_events(response))
        assert [event.data["error"]["code"] for event in events[:-1]] == ["cancelled"] * 3
        assert queued(worker) == 0


def in_any_order(events: list[Event]) -> list[str]:
    """What events say: of several choices, the order among them is free."""
    return sorted(str(event.data) for event in events)


def test_a_request_whose_client_stayed_away_too_long_begins_anew(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with streaming(gateway) as response:
        claimed = worker.take(worker.tokens[:2])
        last = [event for _, event in zip(range(2), read_events(response), strict=False)][-1]
    wait_until(lambda: worker.record(claimed.request_id)[b"state"] == b"done", "the grace period is over")
    with streaming(gateway, after=last.id) as response:
        (again,) = worker.claim()
        assert (again.request_id, again.body.params, again.tokens) == (claimed.request_id, claimed.body.params, ())
        worker.say(again, worker.tokens, end="stop")
        rest = list(read_events(response))
    assert [event.id for event in rest[:-1]] == [
        f"{worker.public(claimed)}:{at}" for at in range(3, len(worker.tokens) + 2)
    ]


def test_what_a_client_cancelled_stays_cancelled(gateway: RunningGateway, worker: PlayedWorker) -> None:
    name = post(gateway, **BODY, background=True).headers["x-request-id"]
    gateway.http.delete(f"/v1/requests/{name}")
    with streaming(gateway, background=True) as response:
        events = list(read_events(response))
    assert events[0].data["error"]["code"] == "cancelled" and queued(worker) == 0


def test_readers_of_two_gateways_hold_one_request_together(
    gateway: RunningGateway, settings: GatewaySettings, worker: PlayedWorker
) -> None:
    with running_gateway(settings) as other, streaming(gateway) as stays:
        (claimed,) = worker.claim()
        with streaming(other):
            worker.say(claimed, worker.tokens[:1])
        disconnected = lambda: other.metric("blockrelay_disconnected_clients_total") == 1  # noqa: E731
        wait_until(disconnected, "the other gateway has no reader")
        # Its grace period passes: it asks who else reads, takes itself off the list, and leaves the request alone.
        followers = worker.keys.followers(claimed.request_id)
        wait_until(lambda: worker.client.hlen(followers) == 1, "it has looked")
        worker.say(claimed, worker.tokens[1:], end="stop")
        assert list(read_events(stays))[-2].data["choices"][0]["finish_reason"] == "stop"


def test_a_gateway_that_is_gone_holds_nothing(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with streaming(gateway) as response:
        name = own_id(response.headers["x-request-id"])
        (claimed,) = worker.claim()
        worker.client.hset(worker.keys.followers(name), "gone", "")
        worker.client.expire(worker.keys.followers(name), 60)
    wait_until(lambda: worker.record(claimed.request_id)[b"state"] == b"done", "it is cancelled all the same")


def test_a_background_request_again_is_the_same_one(gateway: RunningGateway, worker: PlayedWorker) -> None:
    first, second = post(gateway, **BODY, background=True), post(gateway, **BODY, background=True)
    assert (first.status_code, second.status_code) == (202, 202)
    assert first.json() == second.json() and second.headers["idempotent-replayed"] == "true"
    assert queued(worker) == 1
    (claimed,) = worker.claim()
    assert post(gateway, **BODY, background=True).json()["status"] == "running"
    worker.say(claimed, [5], end="stop")
    assert post(gateway, **BODY, background=True).json()["status"] == "completed"


def test_a_tensor_step_with_a_key_is_computed_once(gateway: RunningGateway, worker: PlayedWorker) -> None:
    body = {"input_tensors": {"input_ids": {"_tensor_": True, "data": [[5, 6]]}}}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, gateway, "/v1/infer", **body)
        (claimed,) = worker.claim()
        worker.finish_tensor(claimed, np.ones((1, 512), np.float32))
        first = waiting.result()
    again = post(gateway, "/v1/infer", **body)
    assert again.json()["outputs"] == first.json()["outputs"] and first.status_code == 200
    assert again.headers["idempotent-replayed"] == "true" and queued(worker) == 0


def test_on_a_socket_the_key_is_a_field(gateway: RunningGateway, worker: PlayedWorker) -> None:
    message = json.dumps({"id": 1, "prompt": "Anna", "stream": True, "idempotency_key": "on a socket"})

    def ask() -> list[dict[str, Any]]:
        with connect(gateway.url.replace("http", "ws") + "/v1/infer/ws") as socket:
            socket.send(message)
            answers = [json.loads(socket.recv(timeout=20))]
            while answers[-1]["status"] not in ("success", "error"):
                answers.append(json.loads(socket.recv(timeout=20)))
            return [{**answer, "total_pipeline_time": 0} for answer in answers]

    with answering(worker, lambda _: (worker.tokens, "stop")):
        first = ask()
    assert ask() == first
    resume = first[0]["resume"]
    with gateway.http.stream("GET", f"{resume}{len(worker.tokens)}") as response:
        events = list(read_events(response))
    assert [event.data["status"] for event in events[:-1]] == ["success"]
    refused = gateway.post("/v1/infer", prompt="Anna", idempotency_key="x")
    assert refused.status_code == 400 and "header" in refused.json()["error"]["message"]


def test_openais_client_sends_the_key_as_an_extra_header(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with (
        answering(worker, lambda _: (worker.tokens, "stop")),
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):

        def ask(text: str) -> Any:
            return client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": text}], extra_headers=KEY
            )

        first, again = ask("hi"), ask("hi")
        assert first == again and first.choices[0].message.content == TEXT
        with pytest.raises(openai.UnprocessableEntityError):
            ask("ho")
        with client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], extra_headers=KEY, stream=True
        ) as chunks:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT


def test_the_record_tells_what_happened_when(gateway: RunningGateway, worker: PlayedWorker) -> None:
    before = int(time.time() * 1000) - 1000
    name = post(gateway, **BODY, background=True).headers["x-request-id"]
    claimed = worker.take([5])
    running = gateway.http.get(f"/v1/requests/{name}").json()["timeline"]
    assert [event["event"] for event in running] == ["accepted", "queued", "claimed", "first_token"]
    worker.say(claimed, [6], end="stop")
    ended = gateway.http.get(f"/v1/requests/{name}").json()["timeline"]
    assert ended[:4] == running and ended[4]["event"] == "end" and ended[4]["reason"] == "stop"
    assert before <= ended[0]["at_ms"] <= ended[-1]["at_ms"] < before + 60_000
