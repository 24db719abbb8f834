"""What tensor results may take of Redis' memory: refused before anything is queued, given back once they are read."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis

from blockrelay.auth.api_keys import Tenant, add_key
from blockrelay.protocol.constants import READ_RESULT_S
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.tensors import result_bytes
from blockrelay.redis import client as redis_link
from blockrelay.redis.client import Scripts
from blockrelay.settings import GatewaySettings
from tests.support.gateway.played import PlayedWorker, RunningGateway, running_gateway
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until

VOCAB = 512
#: Results may take an eighth: 1 MiB, which is 511 rows.
MAXMEMORY = 8 << 20


@pytest.fixture
def tight(own_redis: RedisServer) -> Iterator[redis.Redis]:
    """The control Redis, which keeps results too, with little memory."""
    with redis_link.connect(own_redis.url) as client:
        client.config_set("maxmemory", MAXMEMORY)
        yield client


def played(client: redis.Redis, keys: Keys, gateway: RunningGateway) -> PlayedWorker:
    scripts = Scripts(client, keys)
    model = gateway.gateway.served.folder.model_key
    return PlayedWorker(client=client, scripts=scripts, keys=keys, model=model).register()


def step(*rows: int) -> dict[str, Any]:
    """A step with the logits of every token; `rows` has the number of tokens of each row."""
    return {"input_tensors": {"input_ids": [[5] * tokens for tokens in rows]}, "logits": "all"}


def test_what_is_promised_is_there_for_nobody_else_until_it_is_read(
    settings: GatewaySettings, own_redis: RedisServer, tight: redis.Redis, keys: Keys
) -> None:
    settings = settings.model_copy(update={"redis_url": own_redis.url})
    with running_gateway(settings) as gateway, ThreadPoolExecutor() as threads:
        worker = played(tight, keys, gateway)
        never = gateway.post("/v1/infer", **step(256, 256))
        assert never.status_code == 400 and never.json()["error"]["param"] == "logits"
        assert f"here results may take {MAXMEMORY // 8}" in never.json()["error"]["message"]
        first = threads.submit(lambda: httpx.post(f"{gateway.url}/v1/infer", json=step(300), timeout=30))
        (claimed,) = worker.claim()
        refused = gateway.post("/v1/infer", **step(300))
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert gateway.metric("blockrelay_admission_limited_total", limit="result_bytes") == 1
        assert tight.zcard(keys.running) == 1, "a refusal leaves nothing"
        worker.finish_tensor(claimed, np.ones((300, VOCAB), np.float32))
        assert first.result().status_code == 200
        assert 0 <= int(tight.ttl(keys.result(claimed.request_id))) <= READ_RESULT_S  # pyright: ignore[reportArgumentType]
        gone_ms = tight.zscore(keys.results, claimed.request_id)
        seconds, _ = tight.time()  # pyright: ignore[reportGeneralTypeIssues]
        assert isinstance(gone_ms, float) and gone_ms <= 1000 * (int(seconds) + 1 + READ_RESULT_S)
        tight.zadd(keys.results, {claimed.request_id: 1})  # some seconds later
        last = threads.submit(lambda: httpx.post(f"{gateway.url}/v1/infer", json=step(300), timeout=30))
        worker.finish_tensor(worker.claim()[0], np.ones((300, VOCAB), np.float32))
        assert last.result().status_code == 200


def test_a_tenant_takes_half_at_most(
    settings: GatewaySettings, own_redis: RedisServer, tight: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    ada, bob = (add_key(tmp_path / "keys", Tenant(name=name)) for name in ("ada", "bob"))
    settings = settings.model_copy(update={"redis_url": own_redis.url, "api_keys": tmp_path / "keys"})
    with running_gateway(settings) as gateway, ThreadPoolExecutor() as threads:
        worker = played(tight, keys, gateway)

        def ask(key: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(f"{gateway.url}/v1/infer", json=step(200), headers=headers, timeout=30)

        first = threads.submit(ask, ada)
        (claimed,) = worker.claim()
        refused = ask(ada)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert result_bytes(200, VOCAB) <= MAXMEMORY // 16 < 2 * result_bytes(200, VOCAB)
        other = threads.submit(ask, bob)
        for one in (claimed, *worker.claim()):
            worker.finish_tensor(one, np.ones((200, VOCAB), np.float32))
        assert first.result().status_code == other.result().status_code == 200


def test_a_full_payload_redis_lets_nothing_new_in(
    settings: GatewaySettings, own_redis: RedisServer, redis_server: RedisServer
) -> None:
    """Rows between stages must fit, whatever else lies there."""
    settings = settings.model_copy(update={"payload_redis_url": own_redis.url})
    with redis_link.connect(own_redis.url) as payload, running_gateway(settings) as gateway:
        payload.setrange("ballast", 16 << 20, "x")
        payload.config_set("maxmemory", 17 << 20)

        def refused() -> bool:
            answer = gateway.post("/v1/completions", prompt=[5], background=True)
            return answer.status_code == 503 and "payload Redis" in answer.text

        wait_until(refused, "it is refused")
        payload.delete("ballast")
        wait_until(lambda: not refused(), "there is room again")
