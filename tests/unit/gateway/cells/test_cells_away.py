"""One of several cells does not answer: what goes on, and what waits for it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.protocol.encoding.request_ids import own_id
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.cells.placement import PREFIX_TOKENS
from tests.support.gateway.played import PlayedWorker, running_gateway
from tests.support.gateway.several_cells import (
    NAMES,
    all_answer,
    cell_of,
    knows,
    post,
    step,
    tensors_answered,
    worker_of,
)
from tests.support.redis.redis_server import RedisServer
from tests.support.scraping import sampled
from tests.support.systems.cell_file import CellFile
from tests.support.waiting import wait_until


@contextmanager
def stopped(server: RedisServer) -> Iterator[None]:
    """It stands still, and goes on."""
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


def test_new_work_goes_on_while_a_cell_is_away_and_what_belongs_there_waits(
    several: GatewaySettings, apart: CellFile, own_redis: RedisServer, folder: BlockFolder, client: redis.Redis
) -> None:
    there = {"c0": client, "c1": own_redis.client()}
    workers = {name: worker_of(name, at, folder) for name, at in there.items()}
    apart.put(c0=1, c1=1)
    prompts = [[5 + i] * (2 * PREFIX_TOKENS) for i in range(12)]
    with running_gateway(several) as gateway:
        with all_answer(workers):
            homes = [cell_of(post(gateway, prompt=prompt)) for prompt in prompts]
            keyed = {key: cell_of(post(gateway, key)) for key in map(str, range(12))}
        assert set(homes) == set(keyed.values()) == set(NAMES)
        own_redis.kill()
        wait_until(lambda: not gateway.gateway.cells.named("c1").reachable, "the gateway has noticed")
        with all_answer({"c0": workers["c0"]}):
            for home, prompt in zip(homes, prompts, strict=True):
                answer = post(gateway, prompt=prompt)
                assert cell_of(answer) == "c0"
                assert answer.headers.get("blockrelay-instead-of") == (None if home == "c0" else "c1")
            for key, home in keyed.items():
                answer = post(gateway, key)
                assert answer.status_code == (200 if home == "c0" else 503)
        told = "c1: Redis does not answer"
        wait_until(lambda: told in gateway.http.get("/readyz").json()["reasons"], "what was known before is not fresh")
        assert gateway.http.get("/readyz").status_code == 200
        assert sampled(gateway.http.get("/metrics").text, "blockrelay_ready", cell="c1", question="accepting") == 0
    there["c1"].close()


def test_a_session_is_found_while_another_cell_is_away(
    several: GatewaySettings, apart: CellFile, own_redis: RedisServer, folder: BlockFolder, client: redis.Redis
) -> None:
    """Even where that one comes first by the list in force; what is in none that answers may be there."""
    worker = worker_of("c0", client, folder)
    apart.put(c0=1, c1=0)
    with running_gateway(several) as gateway, tensors_answered({"c0": worker}):
        assert step(gateway, "old", 1, 5, 6).status_code == 200
        apart.put(c0=0, c1=1)
        knows(gateway, 2)
        own_redis.kill()
        wait_until(lambda: not gateway.gateway.cells.named("c1").reachable, "the gateway has noticed")
        assert step(gateway, "old", 2, 7).status_code == 200
        elsewhere = step(gateway, "nowhere", 3, 7)
        assert elsewhere.status_code == 503 and "cell c1" in elsewhere.json()["message"]


def test_a_cell_that_stands_still_keeps_no_probe_waiting(
    several: GatewaySettings, apart: CellFile, own_redis: RedisServer, workers: dict[str, PlayedWorker]
) -> None:
    """Else a balancer takes every gateway out, and the other cells with it."""
    apart.put(c0=1, c1=1)
    with running_gateway(several) as gateway, stopped(own_redis):
        for path in ("/readyz", "/readyz?for=accepting"):

            def is_told(path: str = path) -> bool:
                ready = gateway.http.get(path, timeout=4)
                assert ready.status_code == 200
                return "c1: Redis does not answer" in "".join(ready.json()["reasons"])

            wait_until(is_told, "what was known before is not fresh any more")


def test_what_has_begun_in_a_cell_that_answers_is_answered_while_a_former_one_is_away(
    several: GatewaySettings, apart: CellFile, own_redis: RedisServer, folder: BlockFolder, client: redis.Redis
) -> None:
    worker = worker_of("c0", client, folder)
    apart.put(c0=0, c1=1).put(c0=1, c1=0)
    with running_gateway(several) as gateway, all_answer({"c0": worker}), tensors_answered({}):
        first = post(gateway, "k")
        given_up = post(gateway, "given up").headers["x-request-id"]
        own_redis.kill()
        wait_until(lambda: not gateway.gateway.cells.named("c1").reachable, "the gateway has noticed")
        again = post(gateway, "k")
        assert again.json() == first.json() and again.headers["idempotent-replayed"] == "true"
        new = post(gateway, "new")
        assert new.status_code == 503 and "cell c1" in new.json()["error"]["message"]
        client.hset(worker.keys.request(own_id(given_up)), "abandoned", "1")
        assert post(gateway, "given up").status_code == 503, "it may have begun anew in c1"


def test_trouble_is_that_of_the_cell_that_has_it(
    several: GatewaySettings, apart: CellFile, own_redis: RedisServer, workers: dict[str, PlayedWorker]
) -> None:
    apart.put(c0=1, c1=1)
    with running_gateway(several) as gateway:
        own_redis.kill()
        assert gateway.http.get("/v1/requests/req-c1-" + "0" * 24).status_code == 503
        text = gateway.http.get("/metrics").text
    assert sampled(text, "blockrelay_redis_errors_total", cell="c1") > 0
    assert sampled(text, "blockrelay_redis_errors_total", cell="c0") == 0
