"""KV that a client supplied, from a real Redis into the pool; and KV that a client asks for, out of it."""

import queue
from collections.abc import Iterator

import numpy as np
import pytest
import redis
from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.encoding.kv_pages import field
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import connect
from blockrelay_worker.execution.cpu.page_memory import PageMemory
from blockrelay_worker.execution.page_layout import PageLayout
from blockrelay_worker.kv.prefix_cache import PrefixCache
from blockrelay_worker.kv.requested_kv import read_requested
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.kv.store.record import PageShape
from blockrelay_worker.kv.store.store import PageStore
from blockrelay_worker.kv.store.supplied_kv import SuppliedPages
from blockrelay_worker.runs.kv_load import Loaded
from blockrelay_worker.runs.run import Run
from tests.support.worker.runs import new_run

#: Blocks 3 and 4 of a model: layers 2 and 3.
LAYOUT, FIRST_BLOCK = PageLayout(layers=2, kv_heads=2, head_dim=8), 3
SHAPE = PageShape(2, 8, np.float16)
PROMPT = list(range(70))


class Stage:
    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        metrics = WorkerMetrics(CollectorRegistry())
        self.memory, self.mail = PageMemory(LAYOUT, 20), queue.SimpleQueue[Loaded]()
        given = SuppliedPages(client, keys)
        self.store = PageStore(self.memory, [], first_block=FIRST_BLOCK, metrics=metrics, given=given)
        cache = PrefixCache(
            self.memory.pool, model_hash="m", numerics="n", metrics=metrics, store=self.store, deliver=self.mail.put
        )
        self.table = RunTable(self.memory.pool, cache)

    def run(self, request_id: str, given: int) -> Run:
        run = new_run(request_id, PROMPT, private=given > 0, kv_given=given)
        self.table.add(run)
        self.table.attach_prefix(run)
        if run.kv.loading:
            self.table.loaded(self.mail.get(timeout=10))
        return run


@pytest.fixture
def stage(client: redis.Redis, keys: Keys) -> Iterator[Stage]:
    stage = Stage(client, keys)
    yield stage
    stage.table.clear()
    stage.table.check_integrity()
    stage.store.close()


def content(page: int, layer: int) -> bytes:
    return np.full(SHAPE.half_bytes, 10 * page + layer, np.float16).tobytes()


def give(client: redis.Redis, keys: Keys, request_id: str, pages: int, layers: tuple[int, ...] = (1, 2, 3)) -> None:
    fields = {field(page, layer): content(page, layer) for page in range(pages) for layer in layers}
    client.hset(keys.kv_given(request_id), mapping=fields)  # pyright: ignore
    client.expire(keys.kv_given(request_id), 60)


def test_each_stage_takes_its_own_layers(stage: Stage, client: redis.Redis, keys: Keys) -> None:
    give(client, keys, "req-1", 3)
    run = stage.run("req-1", 48)
    assert (run.computed, run.kv.cached) == (48, 48)
    for number, page in enumerate(run.pages[:3]):
        for layer in range(2):
            for pages in (stage.memory.k_pages, stage.memory.v_pages):
                assert (pages[layer][page] == 10 * number + layer + 2).all()
    told = read_requested(stage.memory, FIRST_BLOCK, (0, 3), run.pages[:2])
    assert told == {field(number, 3): content(number, 3) for number in (0, 1)}
    assert read_requested(stage.memory, FIRST_BLOCK, (0, 1), run.pages) == {}


def test_what_others_have_of_the_same_tokens_is_not_taken_and_not_given(
    stage: Stage, client: redis.Redis, keys: Keys
) -> None:
    give(client, keys, "req-1", 4)
    taken = list(stage.run("req-1", 64).pages[:4])
    assert stage.run("req-2", 0).computed == 0, "its client gave nothing"
    assert stage.run("req-3", 64).computed == 0, "of this one nothing is there"
    client.delete(keys.kv_given("req-1"))
    assert stage.run("req-1", 64).pages[:4] == taken, "another run of the request takes what the pool has"


@pytest.mark.parametrize("rest", ["nothing", "rubbish", "a layer less"])
def test_pages_are_taken_as_far_as_they_are_whole(stage: Stage, client: redis.Redis, keys: Keys, rest: str) -> None:
    give(client, keys, "req-1", 2)
    if rest == "rubbish":
        client.hset(keys.kv_given("req-1"), mapping={field(2, 2): b"x", field(2, 3): content(2, 3)})  # pyright: ignore
    elif rest == "a layer less":
        client.hset(keys.kv_given("req-1"), field(2, 3), content(2, 3))
    assert stage.run("req-1", 64).computed == 32


def test_a_redis_that_is_away_gives_nothing(keys: Keys) -> None:
    away = connect("redis://127.0.0.1:1", cell=keys.cell)
    assert SuppliedPages(away, keys).get("req-1", [0, 1], range(3, 5)) == [None, None]
