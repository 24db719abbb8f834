"""The gateway and a Redis that comes late, is restarted, or forgets."""

from collections.abc import Iterator

import pytest
import redis

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Claimed
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import Scripts
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission import accept as admission
from blockrelay_gateway.streaming.active_requests import lost_request_repair
from tests.support.gateway.played import PlayedWorker, RunningGateway, running_gateway
from tests.support.gateway.sse_client import Event, read_events
from tests.support.gateway.streams import TEXT
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

BODY = {"prompt": "Anna", "stream": True, "stream_options": {"event_ids": True}}


@pytest.fixture
def own_gateway(settings: GatewaySettings, own_redis: RedisServer) -> Iterator[RunningGateway]:
    with running_gateway(settings.model_copy(update={"redis_url": own_redis.url})) as running:
        yield running


def own_worker(client: redis.Redis, folder: BlockFolder) -> PlayedWorker:
    keys = Keys("t")
    scripts = Scripts(client, keys)
    return PlayedWorker(client=client, scripts=scripts, keys=keys, model=folder.model_key)


def test_a_stream_goes_on_over_a_restart_of_redis(
    own_gateway: RunningGateway, own_redis: RedisServer, folder: BlockFolder, said: list[int]
) -> None:
    before, after = own_redis.client(), own_redis.client()
    worker = own_worker(before, folder).register()
    with own_gateway.http.stream("POST", "/v1/completions", json=BODY) as response:
        claimed = worker.take(said[:2])
        events = read_events(response)
        got = [next(events), next(events)]
        own_redis.kill()
        wait_until(lambda: not own_gateway.cell.tailer.connected, "the gateway noticed")
        own_redis.start()
        again = own_worker(after, folder)
        again.positions = {claimed.run_id: 2}
        again.say(claimed, said[2:], end="stop")
        got += list(events)
    assert "".join(event.data["choices"][0]["text"] for event in got[:-1]) == TEXT
    assert own_gateway.metric("blockrelay_redis_errors_total") > 0
    assert own_gateway.http.post("/v1/completions", json={"prompt": "x", "background": True}).status_code == 202
    before.close()
    after.close()


def test_a_redis_that_comes_late_is_waited_for(
    settings: GatewaySettings,
    own_redis: RedisServer,
    folder: BlockFolder,
    said: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "ACCEPT_RETRY_S", 0.1)
    own_redis.kill()
    with running_gateway(settings.model_copy(update={"redis_url": own_redis.url})) as gateway:
        assert "Redis does not answer" in gateway.http.get("/readyz").json()["reasons"][0]
        assert gateway.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        own_redis.start()
        client = own_redis.client()
        worker = own_worker(client, folder).register()
        wait_until(lambda: gateway.http.get("/readyz").status_code == 200, "the gateway is ready")
        with gateway.http.stream("POST", "/v1/completions", json=BODY) as response:
            worker.say(worker.claim()[-1], said, end="stop")
            assert [event.data for event in read_events(response)][-1] == "DONE"
        client.close()


def two_tokens_then_forgotten(worker: PlayedWorker, events: Iterator[Event]) -> tuple[list[Event], Claimed, Claimed]:
    """A stream gets two tokens, then Redis loses everything and the gateway accepts the request again.

    The events so far, and the claims before and after.
    """
    first = worker.take(worker.tokens[:2])
    got = [next(events), next(events)]
    worker.client.flushall()
    worker.register()
    (second,) = worker.claim()
    return got, first, second


def test_a_request_that_redis_forgot_is_accepted_again_and_its_stream_goes_on(
    gateway: RunningGateway, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_request_repair, "SILENT_S", 0.2)
    with gateway.http.stream("POST", "/v1/completions", json=BODY) as response:
        events = read_events(response)
        got, first, second = two_tokens_then_forgotten(worker, events)
        assert second.request_id == first.request_id
        assert second.body.params == first.body.params, "the seed above all"
        for token in worker.tokens:
            worker.say(second, [token])
        worker.say(second, [2], end="stop")
        got += list(events)
    assert [event.id for event in got[:-1]] == [
        f"{worker.public(first)}:{at}" for at in range(1, len(worker.tokens) + 3)
    ]
    assert "".join(event.data["choices"][0]["text"] for event in got[:-1]) == TEXT


def test_an_end_at_a_shorter_log_than_was_heard_is_heard(
    gateway: RunningGateway, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis lost its tail, and before the tokens were there again the request ended by decision."""
    monkeypatch.setattr(lost_request_repair, "SILENT_S", 0.2)
    with gateway.http.stream("POST", "/v1/completions", json=BODY) as response:
        events = read_events(response)
        got, first, second = two_tokens_then_forgotten(worker, events)
        worker.say(second, worker.tokens[:1])
        assert worker.scripts.run(calls.finish(first.request_id, "cancelled")) == "FINISHED"
        got += list(events)
    assert [event.id for event in got[:-1]] == [f"{worker.public(first)}:{at}" for at in (1, 2, 3)]
    assert "cancelled" in got[2].data["error"]["message"]
    path = f"/v1/requests/{first.request_id}/events"
    with gateway.http.stream("GET", path, headers={"Last-Event-ID": f"{first.request_id}:2"}) as response:
        (end, _) = read_events(response)
    assert "error" in end.data, "a bad end is told to everybody who asks"
    assert end.id == f"{worker.public(first)}:3", (
        "behind what the client has seen, or it would pass for an event seen before"
    )


def test_a_gateway_that_only_resumed_a_request_accepts_it_again_too(
    settings: GatewaySettings, worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_request_repair, "SILENT_S", 0.2)
    with running_gateway(settings) as first:
        name = first.post("/v1/completions", prompt="x", background=True, timeout=600).json()["id"]
    (claimed,) = worker.claim()
    deadline = worker.record(claimed.request_id)[b"deadline_ms"]
    with running_gateway(settings) as other, other.http.stream("GET", f"/v1/requests/{name}/events") as response:
        worker.client.flushall()
        (again,) = worker.register().claim()
        assert (again.request_id, again.body.params) == (claimed.request_id, claimed.body.params)
        assert worker.record(again.request_id)[b"deadline_ms"] == deadline
        worker.say(again, worker.tokens, end="stop")
        events = list(read_events(response))
    assert "".join(event.data["choices"][0]["text"] for event in events[:-1]) == TEXT


def test_everything_a_gateway_leaves_in_redis_goes_away_by_itself(
    gateway: RunningGateway, worker: PlayedWorker
) -> None:
    with gateway.http.stream("POST", "/v1/completions", json=BODY) as response:
        name = response.headers["x-request-id"]
        worker.take(worker.tokens, end="stop")
        list(read_events(response))
    assert gateway.http.get(f"/v1/requests/{name}/events").status_code == 200
    kept = {
        b"protocol",
        b"workers",
        b"worker",
        b"worker-requests",
        b"inbox",
        b"plan",
        b"jobs",
        b"outstanding",
        b"totals",
        b"shares",
    }  # all of bounded size
    left: list[bytes] = [
        key
        for key in worker.client.scan_iter("*")
        if key.split(b":")[1] not in kept and worker.client.ttl(key) < 0  # pyright: ignore
    ]
    assert left == []
