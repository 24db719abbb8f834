"""Little memory: what has ended yields, and nobody is refused for the past."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import redis

from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import Commit, RequestBody
from blockrelay.protocol.transitions import calls
from blockrelay.redis import client as redis_link
from blockrelay.redis.client import Scripts
from blockrelay.settings import GatewaySettings
from tests.support.gateway.played import PlayedWorker, answering, running_gateway
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

FIVE = [1, 2, 3, 4, 5]
BODY: dict[str, Any] = {"prompt": [7, 8, 9], "max_tokens": 5, "temperature": 0}


def used(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])  # pyright: ignore


def age(client: redis.Redis, keys: Keys) -> None:
    """Everything that has ended did so long ago. In one step, for FORGET goes on meanwhile."""
    script = """
        for _, list in ipairs(KEYS) do
          for _, id in ipairs(redis.call('LRANGE', list, 0, -1)) do
            if redis.call('EXISTS', ARGV[1] .. id) == 1 then redis.call('HSET', ARGV[1] .. id, 'progress_ms', 1) end
          end
        end"""
    client.eval(script, 2, keys.ended("first"), keys.ended("last"), keys.request(""))


def fill(worker: PlayedWorker, most: int) -> int:
    """Requests of five tokens that have ended, `past(0)` and so on, until Redis uses `most` bytes; how many."""
    number = 0
    while used(worker.client) < most:
        for _ in range(64):
            prompt = RequestBody(prompt=np.array(BODY["prompt"], np.int32), params={"max_tokens": 5})
            worker.scripts.run(calls.accept(past(number), prompt, model=worker.model, pages_needed=1, max_in_flight=64))
            number += 1
        worker.scripts.run(
            calls.commit(
                [
                    Commit(request_id=run.request_id, run_id=run.run_id, position=0, tokens=tuple(FIVE), end="length")
                    for run in worker.claim(64)
                ]
            )
        )
    return number


def positions(stream: str) -> list[str]:
    """The event ids of a stream."""
    return [line for line in stream.splitlines() if line.startswith("id:")]


def past(number: int) -> str:
    return f"req-{number:024x}"


def test_the_past_does_not_refuse_the_present(settings: GatewaySettings, own_redis: RedisServer, keys: Keys) -> None:
    settings = settings.model_copy(update={"redis_url": own_redis.url})
    with redis_link.connect(own_redis.url) as client, running_gateway(settings) as gateway:
        model = gateway.gateway.served.folder.model_key
        worker = PlayedWorker(client=client, scripts=Scripts(client, keys), keys=keys, model=model)
        worker.register()
        with answering(worker, lambda claimed: (FIVE, "length")):
            first = gateway.post("/v1/completions", **BODY, seed=1)
            keyed = gateway.http.post(
                "/v1/completions", json={**BODY, "stream": True}, headers={"Idempotency-Key": "k"}
            )
            background = gateway.post("/v1/completions", **BODY, background=True).json()["id"]
            wait_until(lambda: client.zcard(keys.running) == 0, "all have ended")
            age(client, keys)
            client.setrange("ballast", 14 << 20, "x")
            client.config_set("maxmemory", 20 << 20)
            # Nothing that has ended is enough: the refusal stays.
            wait_until(
                lambda: "memory is nearly used up" in gateway.post("/v1/completions", **BODY).text, "it is refused"
            )
            name = own_id(first.json()["id"])
            assert not client.exists(keys.request(name)), "what has ended goes before anybody is refused"
            assert gateway.metric("blockrelay_ended_requests_forgotten_total") >= 3
            client.delete("ballast")
            wait_until(lambda: gateway.post("/v1/completions", **BODY).status_code == 200, "there is room again")
            again = gateway.http.post(
                "/v1/completions", json={**BODY, "stream": True}, headers={"Idempotency-Key": "k"}
            )
            assert "idempotent-replayed" not in again.headers
            assert positions(again.text) == positions(keyed.text)
            assert gateway.http.get(f"/v1/requests/{background}").status_code == 404


def test_everybody_who_would_be_refused_has_the_memory_looked_at(
    settings: GatewaySettings, own_redis: RedisServer, keys: Keys
) -> None:
    """There is room again, which no look has seen yet, and many come at once: nobody is refused by the last look."""
    settings = settings.model_copy(update={"redis_url": own_redis.url})
    with redis_link.connect(own_redis.url) as client, running_gateway(settings) as gateway:
        model = gateway.gateway.served.folder.model_key
        PlayedWorker(client=client, scripts=Scripts(client, keys), keys=keys, model=model).register()
        # Redis 6.2 writes to a block of 10 MiB while it rewrites its file, which it would begin for the ballast.
        client.config_set("auto-aof-rewrite-percentage", 0)
        client.config_set("maxmemory", 20 << 20)

        def refusal(_: int) -> str:
            answer = gateway.post("/v1/completions", **BODY, background=True)
            return "" if answer.is_success else answer.text

        with ThreadPoolExecutor(16) as threads:
            for _ in range(3):
                client.setrange("ballast", 15 << 20, "x")
                wait_until(lambda: gateway.cell.state.full, "memory is short")
                client.delete("ballast")
                assert set(threads.map(refusal, range(48))) == {""}


SIZES = [pytest.param(5, 200, marks=pytest.mark.thorough), pytest.param(20, 2000, marks=pytest.mark.system)]


@pytest.mark.parametrize(("mib", "requests"), SIZES)
def test_a_stream_of_requests_goes_through_little_memory(
    settings: GatewaySettings, own_redis: RedisServer, keys: Keys, mib: int, requests: int
) -> None:
    """The past alone takes more than is refused at, and everybody who comes is answered, for it yields; but for the
    oldest, which are read. Ends lie back as far as the test says, so it does not matter how fast it runs.
    """
    settings = settings.model_copy(update={"redis_url": own_redis.url})
    with redis_link.connect(own_redis.url) as client, running_gateway(settings) as gateway:
        scripts, model = Scripts(client, keys), gateway.gateway.served.folder.model_key
        worker = PlayedWorker(client=client, scripts=scripts, keys=keys, model=model).register()
        client.config_set("appendfsync", "no")  # thousands of commands, and no disk is asked about
        # Redis 6.2 writes to a block of 10 MiB while it rewrites its file: half of the room here, and OOM.
        client.config_set("auto-aof-rewrite-percentage", 0)
        ended = fill(worker, int(0.72 * (mib << 20)))
        read = f"/v1/requests/{past(0)}/events"
        heard = positions(gateway.http.get(read).text)
        assert len(heard) == 7, "its beginning, five tokens, its end"
        asked_for = [past(number) for number in range(200)]
        for name in asked_for:
            client.hset(keys.followers(name), "another gateway", "")
            client.expire(keys.followers(name), 10**6)  # as if clients asked for it all the time
        age(client, keys)
        client.config_set("maxmemory", mib << 20)
        wait_until(
            lambda: not client.exists(keys.request(past(200))) and used(client) < 0.6 * (mib << 20), "the past yields"
        )

        def post(number: int) -> tuple[int, list[int]]:
            answer = gateway.post("/v1/completions", **BODY, return_token_ids=True)
            return answer.status_code, answer.json()["choices"][0]["token_ids"] if answer.is_success else []

        with answering(worker, lambda claimed: (FIVE, "length"), each=False), ThreadPoolExecutor(8) as threads:
            for first in range(0, requests, 50):
                answers = list(threads.map(post, range(first, first + 50)))
                assert answers == [(200, FIVE)] * 50
                age(client, keys)
        total = ended + requests
        wait_until(
            lambda: (
                gateway.metric("blockrelay_ended_requests_forgotten_total") + client.llen(keys.ended("first")) == total
            ),
            "each is there or was forgotten",
        )
        assert used(client) < 0.7 * (mib << 20)
        assert positions(gateway.http.get(read).text) == heard
        assert client.exists(*map(keys.request, asked_for)) == len(asked_for)
