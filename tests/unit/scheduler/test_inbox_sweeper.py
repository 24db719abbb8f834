"""The inbox sweeper with a payload Redis that refuses to delete; test_loop.py has one that does not answer."""

from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.scheduler import SchedulerMetrics
from blockrelay.protocol.keys import Keys
from blockrelay_scheduler.inbox_sweeper import InboxSweeper
from tests.support.redis.redis_server import RedisServer
from tests.support.waiting import wait_until


def test_what_is_refused_is_tried_again(own_redis: RedisServer) -> None:
    payload, keys, registry = own_redis.client(), Keys("t"), CollectorRegistry()
    payload.xadd(keys.inbox("gone"), {"rows": b"rows"})
    payload.config_set("min-replicas-to-write", 1)  # every write is refused, as with a full disk
    sweeper = InboxSweeper(payload, keys, SchedulerMetrics(registry))
    sweeper.start()
    sweeper.sweep(frozenset({"gone"}))
    wait_until(lambda: registry.get_sample_value("blockrelay_redis_errors_total"), "it was refused")
    payload.config_set("min-replicas-to-write", 0)
    wait_until(lambda: not payload.exists(keys.inbox("gone")), "the inbox is gone")
    sweeper.close()
    assert not sweeper.is_alive()
    payload.close()


def test_it_ends_behind_a_command_that_is_under_way(own_redis: RedisServer) -> None:
    """Who closes the client under it would meet a thread in the middle of a command."""
    payload, other, keys = own_redis.client(), own_redis.client(), Keys("t")
    payload.xadd(keys.inbox("gone"), {"rows": b"rows"})
    sweeper = InboxSweeper(payload, keys, SchedulerMetrics(CollectorRegistry()))
    sweeper.start()
    other.execute_command("CLIENT", "PAUSE", 300, "ALL")
    sweeper.sweep(frozenset({"gone"}))
    sweeper.close()
    assert not sweeper.is_alive()
    payload.close()
    other.close()
