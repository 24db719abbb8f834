"""Little memory: what has ended yields, and nobody is refused for the past."""

from typing import Any, cast

import redis

from blockrelay import redis_link
from blockrelay.keys import Keys
from blockrelay.redis_link import Scripts
from blockrelay.settings import GatewaySettings
from tests.support.played import PlayedWorker, answering, running_gateway
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

FIVE = [1, 2, 3, 4, 5]
BODY: dict[str, Any] = {"prompt": [7, 8, 9], "max_tokens": 5, "temperature": 0}


def used(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])  # pyright: ignore


def age(client: redis.Redis, keys: Keys) -> None:
    """Everything that has ended did so long ago."""
    for kind in (keys.ended("first"), keys.ended("last")):
        for name in cast(list[bytes], client.lrange(kind, 0, -1)):
            if client.exists(keys.request(name.decode())):
                client.hset(keys.request(name.decode()), "moved", "1")


def test_the_past_does_not_refuse_the_present(settings: GatewaySettings, own_redis: RedisServer, keys: Keys) -> None:
    settings = settings.model_copy(update={"redis_url": own_redis.url})
    with redis_link.connect(own_redis.url) as client, running_gateway(settings) as gateway:
        model = gateway.gateway.model_key
        worker = PlayedWorker(client=client, scripts=Scripts(client, keys, retention_s=900), keys=keys, model=model)
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
            name = first.json()["id"].replace("cmpl-", "req-")
            assert not client.exists(keys.request(name)), "what has ended goes before anybody is refused"
            assert gateway.metric("blockrelay_ended_requests_forgotten_total") >= 3
            client.delete("ballast")
            wait_until(lambda: gateway.post("/v1/completions", **BODY).status_code == 200, "there is room again")
            worker.positions.clear()  # the same id begins anew
            again = gateway.http.post(
                "/v1/completions", json={**BODY, "stream": True}, headers={"Idempotency-Key": "k"}
            )
            assert "idempotent-replayed" not in again.headers
            assert [line for line in again.text.splitlines() if line.startswith("id:")] == [
                line for line in keyed.text.splitlines() if line.startswith("id:")
            ]
            assert gateway.http.get(f"/v1/requests/{background}").status_code == 404


def test_a_stream_of_requests_goes_through_little_memory(
    settings: GatewaySettings, own_redis: RedisServer, keys: Keys
) -> None:
    """More requests than there is room for, and each finds room, for those before it yield."""
    settings = settings.model_copy(update={"redis_url": own_redis.url})
    with redis_link.connect(own_redis.url) as client, running_gateway(settings) as gateway:
        model = gateway.gateway.model_key
        worker = PlayedWorker(client=client, scripts=Scripts(client, keys, retention_s=900), keys=keys, model=model)
        worker.register()
        with answering(worker, lambda claimed: (FIVE, "length")):
            gateway.post("/v1/completions", **BODY)
            client.config_set("maxmemory", int((used(client) + (100 << 10)) / 0.5))
            fitting = (100 << 10) // 800
            for number in range(4 * fitting):
                assert gateway.post("/v1/completions", **BODY).status_code == 200, number
                if number % 50 == 49:
                    age(client, keys)
            wait_until(lambda: gateway.metric("blockrelay_ended_requests_forgotten_total") > 0, "some have yielded")
