"""A Redis that somebody else runs: `up` says what of the promises it does not keep."""

from collections.abc import Iterator

import pytest
import redis

from blockrelay_launcher.supervisor.preflight import warnings_about, weaknesses
from tests.support.redis.redis_server import RedisServer


@pytest.fixture
def own_client(own_redis: RedisServer) -> Iterator[redis.Redis]:
    with own_redis.client() as connection:
        yield connection


def test_a_redis_as_ours_has_no_weakness(own_redis: RedisServer, own_client: redis.Redis) -> None:
    assert weaknesses(own_client) == []
    assert warnings_about(own_redis.url, "t") == []


def test_each_broken_promise_is_one_warning(own_redis: RedisServer, own_client: redis.Redis) -> None:
    own_client.config_set("appendfsync", "everysec")
    own_client.config_set("maxmemory", "100mb")
    own_client.config_set("maxmemory-policy", "allkeys-lru")
    fsync, eviction = warnings_about(own_redis.url, "t")
    assert "appendfsync is everysec" in fsync and "maxmemory-policy is allkeys-lru" in eviction
    own_client.config_set("appendonly", "no")
    assert "appendonly yes" in warnings_about(own_redis.url, "t")[0]


def test_rows_through_the_append_only_file_are_a_warning(own_redis: RedisServer, own_client: redis.Redis) -> None:
    (line,) = warnings_about(own_redis.url, "t", carries_rows=True)
    assert "--payload-redis" in line
    own_client.config_set("appendonly", "no")
    (line,) = weaknesses(own_client, carries_rows=True)
    assert "appendonly yes" in line, "then there is no file that rows could wait for"


def test_a_redis_that_hides_its_settings_is_believed(own_redis: RedisServer, own_client: redis.Redis) -> None:
    own_client.execute_command("ACL", "SETUSER", "default", "-config", "-info")
    assert weaknesses(own_client) == []


def test_a_redis_that_is_away_is_nobodys_weakness(own_redis: RedisServer) -> None:
    own_redis.kill()
    assert warnings_about(own_redis.url, "t") == []
