"""Streams: one event per token with its position, resumable anywhere, never closed in silence."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import openai
import pytest
import structlog

from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.messages import TokenLogprobs
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.streaming.active_requests import lost_request_repair
from tests.support.gateway.played import NUMERICS, PlayedWorker, RunningGateway, answering, running_gateway
from tests.support.gateway.sse_client import Event, read_events
from tests.support.gateway.streams import TEXT, WITH_IDS, stream, wait_for_keep_alives
from tests.support.waiting import wait_until


def text_of(events: list[Event]) -> str:
    return "".join(e.data["choices"][0]["text"] for e in events if e.data != "DONE" and e.data["choices"])


def test_a_stream_has_one_event_per_token_and_its_position_as_id(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with answering(worker, lambda _: (worker.tokens, "length")):
        events = stream(
            gateway, prompt="Anna", seed=5, return_token_ids=True, stream_options={"include_usage": True}
        )  # fmt: skip
    *tokens, end, usage, done = events
    assert done.data == "DONE"
    request = tokens[0].data["id"].replace("cmpl-", "req-")
    assert [event.id for event in tokens] == [f"{request}:{at}" for at in range(1, len(worker.tokens) + 1)]
    assert [event.data["choices"][0]["token_ids"] for event in tokens] == [[token] for token in worker.tokens]
    assert text_of(events) == TEXT
    assert (end.id, usage.id) == (f"{request}:{len(worker.tokens) + 1}", f"{request}:{len(worker.tokens) + 2}")
    assert end.data["choices"][0]["finish_reason"] == "length"
    assert end.data["choices"][0]["seed"] == 5
    assert end.data["fallback_events"] == []
    assert usage.data["usage"]["completion_tokens"] == len(worker.tokens)
    assert usage.data["choices"] == []
    assert {event.data["system_fingerprint"] for event in events[:-1]} == {NUMERICS}
    assert all("\ufffd" not in str(event.data) for event in events), "a character split over tokens is never shown"


def test_openais_client_reads_streams_through_silence_and_keep_alives(
    gateway: RunningGateway, worker: PlayedWorker
) -> None:
    pieces: list[str] = []
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True, extra_body={"top_k": 5}
        ) as chunks,
    ):
        claimed = worker.claim()[0]
        assert len(gateway.cell.registry) == 1
        worker.say(claimed, worker.tokens[:1])
        for at, chunk in enumerate(chunks):  # the role's, then one for each token
            pieces.append(chunk.choices[0].delta.content or "")
            if at == 1:
                worker.say(claimed, worker.tokens[1:2])
            if at == 2:  # a silence longer than the keep-alive interval
                wait_for_keep_alives(gateway)
                worker.say(claimed, worker.tokens[2:], end="stop")
    assert "".join(pieces) == TEXT


def test_openais_client_gets_the_same_without_streaming(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        answering(worker, lambda _: (worker.tokens, "stop")),
    ):
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=50, temperature=0
        )
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt="x", n=129)
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")
        assert [model.id for model in client.models.list()] == ["tiny"]
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == len(worker.tokens)
    assert answer.system_fingerprint == NUMERICS
    assert refused.value.param == "n"


def test_several_prompts_share_one_stream_by_index(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with answering(worker, lambda claimed: ([int(claimed.body.prompt[0])] * 2, "length")):
        events = stream(gateway, prompt=[[10], [20], [30]], return_token_ids=True)
        whole = gateway.post("/v1/completions", prompt=[[10], [20], [30]], return_token_ids=True).json()
    assert [choice["token_ids"] for choice in whole["choices"]] == [[10, 10], [20, 20], [30, 30]]
    assert whole["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in events[:-1]:
        (choice,) = event.data["choices"]
        got[choice["index"]] += choice["token_ids"]
    assert events[-2].id is not None and events[-2].id.endswith(":3.3.3")
    assert {event.data["id"] for event in events[:-1]} == {events[0].data["id"]}, "one answer has one id"
    assert got == {0: [10, 10], 1: [20, 20], 2: [30, 30]}


def test_logprobs_come_in_both_shapes(gateway: RunningGateway, worker: PlayedWorker) -> None:
    logprobs = [TokenLogprobs(-0.5, ((token, -0.5), (2, -1.0))) for token in worker.tokens]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "x", "logprobs": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2},
        ),
    ]
    for path, body in bodies:
        with gateway.http.stream("POST", path, json={**body, "stream": True}) as response:
            (claimed,) = worker.claim()
            assert claimed.body.params["logprobs"] == 2
            worker.say(claimed, worker.tokens, logprobs=logprobs, end="length")
            events = list(read_events(response))
            whole = gateway.http.get(f"/v1/requests/{response.headers['x-request-id']}").json()
        assert whole["token_ids"] == worker.tokens
        found = [c["logprobs"] for e in events[:-1] for c in e.data["choices"] if c["logprobs"]]
        assert len(found) == len(worker.tokens)
        if path == "/v1/completions":
            assert found[0]["token_logprobs"] == [-0.5]
            assert found[0]["top_logprobs"][0]["</s>"] == -1.0
            assert [one["text_offset"][0] for one in found][:2] == [0, len(events[0].data["choices"][0]["text"])]
        else:
            (content,) = found[0]["content"]
            assert bytes(content["bytes"]).decode() == content["token"]
            assert content["top_logprobs"][1] == {"token": "</s>", "logprob": -1.0, "bytes": list(b"</s>")}


@pytest.mark.parametrize("asked", [0, 1])
def test_completions_list_the_chosen_token_even_where_it_is_none_of_the_likeliest(
    gateway: RunningGateway, worker: PlayedWorker, asked: int
) -> None:
    best = ((2, -1.0),)[:asked]
    logprobs = [TokenLogprobs(-5.0, best) for _ in worker.tokens]
    for streamed in (True, False):
        body = {"prompt": "x", "logprobs": asked, "temperature": 2}
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(lambda body=body | {"stream": streamed}: gateway.post("/v1/completions", **body))
            worker.take(worker.tokens, logprobs=logprobs, end="length")
            response = reading.result()
        answers = [event.data for event in read_events(response)][:-1] if streamed else [response.json()]
        told = [c["logprobs"] for one in answers for c in one["choices"] if c["logprobs"]]
        for token, top in ((t, top) for one in told for t, top in zip(one["tokens"], one["top_logprobs"], strict=True)):
            assert top == {"</s>": -1.0, token: -5.0} if asked else {token: -5.0}


def test_a_stream_that_broke_goes_on_behind_the_last_event_it_had(
    gateway: RunningGateway, settings: GatewaySettings, worker: PlayedWorker
) -> None:
    with structlog.testing.capture_logs() as lines, running_gateway(settings) as other:
        with ExitStack() as stack:
            with gateway.http.stream("POST", "/v1/completions", json=WITH_IDS) as response:
                claimed = worker.take(worker.tokens[:4])
                events = read_events(response)
                first = [next(events) for _ in range(3)]
                name = first[-1].data["id"]
                headers = {"last-event-id": first[-1].id or ""}
                resumed = other.http.stream("GET", f"/v1/requests/{name}/events", headers=headers)
                events = read_events(stack.enter_context(resumed))
                second = [next(events)]  # within the grace period, however slow the machine is
            # The first connection is gone; the request goes on, and any gateway continues it. Longer than the grace
            # period of the gateway that the client left: it must not cancel.
            wait_until(lambda: any(line["event"] == "READER_ELSEWHERE" for line in lines), "the first lets go")
            worker.say(claimed, worker.tokens[4:], end="length")
            second += list(events)
        assert [event.id for event in second[:-1]] == [
            f"{worker.public(claimed)}:{at}" for at in range(4, len(worker.tokens) + 2)
        ]
        assert text_of(first + second[:-1]) == TEXT
        again = other.http.get(f"/v1/requests/{name}/events", params={"starting_after": len(worker.tokens)}).text
        assert '"finish_reason":"length"' in again
        assert again.count("\ndata: ") == 1 + 1, "the end and [DONE]"


def test_a_client_that_goes_away_has_its_request_cancelled_after_the_grace_period(
    gateway: RunningGateway, worker: PlayedWorker
) -> None:
    with gateway.http.stream("POST", "/v1/completions", json=WITH_IDS) as response:
        claimed = worker.take(worker.tokens[:1])
        assert next(read_events(response)).id == f"{worker.public(claimed)}:1"
    wait_until(lambda: worker.record(claimed.request_id)[b"state"] == b"done", "the request is cancelled")
    assert worker.record(claimed.request_id)[b"end"] == b"cancelled"
    wait_until(lambda: len(gateway.cell.registry) == 0, "the gateway has heard of it, and nothing is left")
    assert gateway.metric("blockrelay_disconnected_clients_total") == 1
    assert gateway.metric("blockrelay_finished_requests_total", finished_reason="cancelled") == 1
    assert gateway.metric("blockrelay_gateway_requests_running") == 0


def test_a_client_that_waits_without_streaming_may_go_away_too(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=0.3) as client,
        pytest.raises(openai.APITimeoutError),
    ):
        client.completions.create(model="tiny", prompt="x")
    (claimed,) = worker.claim()
    wait_until(lambda: worker.record(claimed.request_id)[b"state"] == b"done", "the request is cancelled")


def test_a_client_that_comes_back_in_time_keeps_its_request(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with gateway.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        name = response.headers["x-request-id"]
        (claimed,) = worker.claim()
    wait_until(lambda: gateway.metric("blockrelay_disconnected_clients_total") == 1, "the gateway noticed")
    with gateway.http.stream("GET", f"/v1/requests/{name}/events") as response:
        worker.say(claimed, worker.tokens, end="stop")
        events = list(read_events(response))
    assert events[0].data["status"] == "accepted"
    assert events[-2].data["outputs"]["text"] == TEXT
    assert events[-2].data["finish_reason"] == "stop"


def test_a_background_request_needs_nobody(gateway: RunningGateway, worker: PlayedWorker) -> None:
    response = gateway.post("/v1/completions", prompt="x", background=True, seed=3)
    assert response.status_code == 202
    name = response.json()["id"]
    assert response.json()["status"] == "queued"
    assert gateway.http.get(f"/v1/requests/{name}").json()["status"] == "queued"
    (claimed,) = worker.claim()
    assert claimed.body.background
    worker.say(claimed, worker.tokens[:2])
    running = gateway.http.get(f"/v1/requests/{name}").json()
    assert (running["status"], running["token_ids"], running["finish_reason"]) == ("running", worker.tokens[:2], None)
    worker.say(claimed, worker.tokens[2:], end="stop")
    done = gateway.http.get(f"/v1/requests/{name}").json()
    assert (done["status"], done["text"], done["finish_reason"]) == ("completed", TEXT, "stop")
    assert done["usage"]["completion_tokens"] == len(worker.tokens)
    assert done["seed"] == 3
    assert done["system_fingerprint"] == NUMERICS
    assert own_id(done["request_id"]) == claimed.request_id
    with gateway.http.stream("GET", f"/v1/requests/{name}/events", params={"include_usage": True}) as stream_of:
        assert text_of(list(read_events(stream_of))) == TEXT
    assert gateway.metric("blockrelay_disconnected_clients_total") == 0


def test_a_stream_can_be_read_again_from_every_position(gateway: RunningGateway, worker: PlayedWorker) -> None:
    with answering(worker, lambda _: (worker.tokens, "length")):
        whole = stream(gateway, prompt="x", stop=["zebra"])
    name = whole[0].data["id"]
    for after in range(len(worker.tokens) + 2):
        with gateway.http.stream("GET", f"/v1/requests/{name}/events", params={"starting_after": after}) as response:
            assert [(e.id, e.data) for e in read_events(response)] == [(e.id, e.data) for e in whole[after:]]
    # A browser that comes back sends both: the URL with which it began, and how far it has got.
    url = f"/v1/requests/{name}/events?starting_after=1"
    with gateway.http.stream("GET", url, headers={"last-event-id": "3"}) as response:
        assert [e.id for e in read_events(response)] == [e.id for e in whole[3:]]
    for wrong in ("x", "-1", "9" * 30):
        response = gateway.http.get(f"/v1/requests/{name}/events", headers={"last-event-id": wrong})
        assert response.json()["error"]["param"] == "Last-Event-ID"
        assert gateway.http.get(f"/v1/requests/{name}/events?starting_after=x").status_code == 400


@pytest.mark.parametrize("way", ["delete", "cancel"])
def test_a_request_can_be_cancelled_and_its_reader_hears_of_it(
    gateway: RunningGateway, worker: PlayedWorker, way: str
) -> None:
    with gateway.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        name = response.headers["x-request-id"]
        worker.take(worker.tokens[:1])
        if way == "delete":
            answer = gateway.http.delete(f"/v1/requests/{name}")
        else:
            answer = gateway.http.post(f"/v1/requests/{name}/cancel")
        events = list(read_events(response))
    assert answer.json()["status"] == "cancelled"
    assert events[-1].data == "DONE"
    assert events[-2].data["error"]["code"] == "cancelled"
    assert gateway.http.delete(f"/v1/requests/{name}").json()["status"] == "cancelled", "twice is once"


def test_an_error_in_mid_stream_is_an_event_and_without_a_stream_a_status(
    gateway: RunningGateway, worker: PlayedWorker
) -> None:
    meta = {"error": "the row is not finite", "failed_block": "block_2"}
    with gateway.http.stream("POST", "/v1/completions", json=WITH_IDS) as response:
        worker.say(worker.claim()[0], worker.tokens[:1], end="error", meta=meta)
        events = list(read_events(response))
    assert events[-2].data["error"]["message"] == "the row is not finite"
    assert events[-2].id is not None and events[-2].id.endswith(":2")
    with answering_error(worker, meta):
        answer = gateway.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
        pipeline = gateway.post("/v1/infer", prompt="x")
    assert answer.status_code == pipeline.status_code == 500
    assert answer.json()["error"]["message"] == "the row is not finite"
    body = pipeline.json()
    assert body["message"] == "Pipeline failed at block_2: the row is not finite"
    assert body["failed_block"] == "block_2"
    assert body["failed_blocks"][0]["error"] == "the row is not finite"


def answering_error(worker: PlayedWorker, meta: dict[str, Any]) -> Any:
    """Every request fails."""

    class _Failing(PlayedWorker):
        def say(self, claimed: Any, tokens: list[int], **more: Any) -> None:
            super().say(claimed, tokens, end="error", meta=meta)

    failing = _Failing(client=worker.client, scripts=worker.scripts, keys=worker.keys, model=worker.model)
    return answering(failing, lambda _: ([5], "error"))


def test_a_request_past_its_timeout_ends_as_expired(gateway: RunningGateway, worker: PlayedWorker) -> None:
    answer = gateway.post("/v1/completions", prompt="x", timeout=0.1)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "expired"
    assert worker.client.zcard(worker.keys.running) == 0


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_anew_beside_the_gateway_ends_nothing(
    gateway: RunningGateway, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    monkeypatch.setattr(lost_request_repair, "REPAIR_EVERY_S", 0.02)
    true = time.time
    body = {"prompt": [3, 4], "max_tokens": 2, "timeout": 600, "background": True}
    before = gateway.post("/v1/completions", **body)
    monkeypatch.setattr(time, "time", lambda: true() + hours * 3600)
    after = gateway.post("/v1/completions", **body)
    assert before.status_code == after.status_code == 202, after.text
    claimed = worker.claim(2)
    for one in claimed:
        left_s = int(worker.record(one.request_id)[b"deadline_ms"]) / 1000 - true()
        assert 590 < left_s < 610, "it is that of Redis' clock"
    (beat,) = worker.client.keys(worker.keys.gateway("*"))  # pyright: ignore[reportGeneralTypeIssues]
    for _ in range(2):  # then a whole round of its care for requests has passed
        worker.client.delete(beat)
        wait_until(lambda: worker.client.exists(beat) == 1, "it says again that it lives")
    for one in claimed:
        worker.say(one, [5], end="stop")
        wait_until(lambda: worker.record(one.request_id)[b"state"] == b"done", "it ends")  # noqa: B023
        assert worker.record(one.request_id)[b"end"] == b"stop"


def test_a_gateway_that_shuts_down_tells_its_readers_and_leaves_the_request_alone(
    settings: GatewaySettings, worker: PlayedWorker
) -> None:
    with (
        running_gateway(settings) as gateway,
        gateway.http.stream("POST", "/v1/completions", json=WITH_IDS) as response,
    ):
        claimed = worker.take(worker.tokens[:1])
        events = read_events(response)
        assert next(events).id == f"{worker.public(claimed)}:1"
        gateway.cell.registry.close()
        error, done = list(events)
    assert "shuts down" in error.data["error"]["message"]
    rest = worker.public(claimed).replace("req-", "/v1/requests/cmpl-") + "/events?starting_after=1"
    assert error.data["error"]["message"].endswith(rest)
    assert done.data == "DONE"
    assert worker.record(claimed.request_id)[b"state"] == b"running"


def test_the_trace_of_the_caller_travels_with_the_request(gateway: RunningGateway, worker: PlayedWorker) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = {"prompt": "x", "background": True}
    gateway.http.post("/v1/completions", json=body, headers={"traceparent": trace})
    assert worker.claim()[0].body.traceparent == trace
