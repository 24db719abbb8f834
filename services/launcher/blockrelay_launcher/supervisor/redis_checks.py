"""Checks the settings of a user's Redis: accepted requests must be on disk, and nothing may be evicted."""

from typing import Any, cast

import redis

from blockrelay.errors import RedisRefused, RedisTrouble
from blockrelay.redis import client as redis_link
from blockrelay.redis.errors import CommandError


def weaknesses(client: redis.Redis, *, carries_rows: bool = False) -> list[str]:
    """Returns a line for each setting of a control Redis that weakens a promise; hidden settings count as good.

    `carries_rows`: the server is the payload Redis too, and its append-only file gives a line, also if hidden. `up`
    starts none of its own then, because workers on other hosts that share the control Redis could not reach it. Raises
    RedisTrouble if the server does not answer.
    """
    lines: list[str] = []
    try:
        info: dict[str, Any] = client.info()
    except (RedisRefused, CommandError):
        info = {}
    if info.get("aof_enabled") == 0:
        lines.append("it keeps no append-only file, so its crash loses accepted requests (set appendonly yes)")
    elif (fsync := _setting(client, "appendfsync")) not in (None, "always"):
        lines.append(f"its appendfsync is {fsync}, so its crash loses the last requests accepted (set always)")
    if carries_rows and info.get("aof_enabled") != 0:
        lines.append(
            "it is the payload Redis too, so every row and every tensor result waits for its append-only file and takes"
            " its memory (give --payload-redis URL, a Redis without AOF that all workers reach)"
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory") and policy != "noeviction":
        lines.append(f"its maxmemory-policy is {policy}, so requests vanish when it is full (set noeviction)")
    return lines


def _setting(client: redis.Redis, name: str) -> str | None:
    """Returns a setting of the server; None where CONFIG is hidden, as on managed servers."""
    try:
        return cast(dict[str, str], client.config_get(name)).get(name)
    except (RedisRefused, CommandError):
        return None


def warnings_about(url: str, cell: str, *, carries_rows: bool = False) -> list[str]:
    """Returns warnings for the user about the control Redis at `url`; none while it does not answer.

    `carries_rows`: as for `weaknesses`.
    """
    with redis_link.connect(url, cell=cell) as client:
        try:
            lines = weaknesses(client, carries_rows=carries_rows)
        except RedisTrouble:
            return []
    return [f"warning: the Redis of --redis weakens a promise: {line}" for line in lines]
