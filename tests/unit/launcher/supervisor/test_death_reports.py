"""Reports of deaths: at once where Redis takes them, later where it does not, and never in the way of supervision."""

import os
import socket

import redis

from blockrelay.host.identity import process_prefix
from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import Scripts
from blockrelay.redis.registry import read_accounting
from blockrelay.settings import Settings
from blockrelay_launcher.supervisor.death_reports import DeathReports
from tests.support.cell import MODEL, Cell, begin_cell
from tests.support.redis.redis_answers import answering
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until


def test_a_worker_of_another_machine_with_our_name_and_number_lives_on(own_redis: RedisServer) -> None:
    client: redis.Redis = own_redis.client()
    keys, said = Keys("t"), list[str]()
    begin_cell(client, keys)
    cell = Cell(client, keys, Scripts(client, keys))
    ours = cell.worker(process_prefix(os.getpid()) + "abc", split="1-4")
    theirs = cell.worker(f"{socket.gethostname()}:{os.getpid()}:{'0' * 6}abc", split="1-4")
    reports = DeathReports(Settings(cell="t"), own_redis.url, said.append)
    reports.start()
    reports.add(os.getpid())
    assert reports.flush(10)
    assert client.zscore(keys.workers, ours) is None and client.zscore(keys.workers, theirs) is not None
    reports.close()
    client.close()


def test_what_redis_does_not_take_is_reported_later(own_redis: RedisServer) -> None:
    client: redis.Redis = own_redis.client()
    keys, said = Keys("t"), list[str]()
    begin_cell(client, keys)
    cell = Cell(client, keys, Scripts(client, keys))
    name = cell.worker(process_prefix(os.getpid()) + "abc", split="1-4")
    run = cell.begin(name)
    reports = DeathReports(Settings(cell="t"), own_redis.url, said.append)
    reports.start()
    with answering(own_redis, "OOM"):
        reports.add(os.getpid())
        wait_until(lambda: said, "it says that the report waits")
        assert not reports.flush(0.0) and client.zscore(keys.workers, name) is not None
    assert reports.flush(10)
    assert client.zscore(keys.workers, name) is None and client.hget(keys.request(run.request_id), "state") == b"queued"
    books = read_accounting(client, keys, MODEL)
    assert books.deaths == 1 and books.reruns == {"death": 1}, "what schedulers tell of it, who report no such death"
    assert "cannot be reported yet: Redis is full" in said[0] and "is reported" in said[-1] and len(said) == 2
    reports.close()
    client.close()
