"""What a Redis that is not ours does not promise: accepted must mean on disk, and nothing may be evicted."""

from typing import Any, cast

import redis

from blockrelay.errors import RedisRefused, RedisTrouble
from blockrelay.redis import client as redis_link
from blockrelay.redis.errors import CommandError


def weaknesses(client: redis.Redis, *, carries_rows: bool = False) -> list[str]:
    """One line for each setting of a control Redis that breaks a promise; nothing about what the server hides.

    `carries_rows`: it is the payload Redis too. `up` does not bring one of its own then: workers on other hosts that
    share the control Redis could not reach it.

    Raises RedisTrouble when it does not answer.
    """
    found: list[str] = []
    try:
        info: dict[str, Any] = client.info()
    except (RedisRefused, CommandError):
        info = {}
    if info.get("aof_enabled") == 0:
        found.append("it keeps no append-only file, so its crash loses accepted requests (set appendonly yes)")
    elif (fsync := _setting(client, "appendfsync")) not in (None, "always"):
        found.append(f"its appendfsync is {fsync}, so its crash loses the last requests accepted (set always)")
    if carries_rows and info.get("aof_enabled") != 0:
        found.append(
            "it is the payload Redis too, so every row and every tensor result waits for its append-only file and takes"
            " its memory (give --payload-redis URL, a Redis without AOF that all workers reach)"
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory") and policy != "noeviction":
        found.append(f"its maxmemory-policy is {policy}, so requests vanish when it is full (set noeviction)")
    return found


def _setting(client: redis.Redis, name: str) -> str | None:
    """None where CONFIG is hidden, as managed servers do."""
    try:
        return cast(dict[str, str], client.config_get(name)).get(name)
    except (RedisRefused, CommandError):
        return None


def warnings_about(url: str, cell: str, *, carries_rows: bool = False) -> list[str]:
    """The weaknesses of the control Redis at `url`; none while it does not answer."""
    client = redis_link.connect(url, cell=cell)
    try:
        return [
            f"warning: the Redis of --redis weakens a promise: {line}"
            for line in weaknesses(client, carries_rows=carries_rows)
        ]
    except RedisTrouble:
        return []
    finally:
        client.close()
