"""Reads how much memory a Redis uses and may use."""

from typing import Any, NamedTuple, cast

import redis.asyncio


class RedisMemory(NamedTuple):
    """Bytes in use, the limit `maxmemory` (0: none), and the memory of Redis' machine."""

    used: int
    limit: int
    machine: int


async def read_memory(client: redis.asyncio.Redis) -> RedisMemory:
    """Reads the memory figures with INFO; 0 for one that Redis does not send. Raises RedisTrouble."""
    fields = cast(dict[str, Any], await cast(Any, client.info("memory")))
    return RedisMemory(*(int(fields.get(name, 0)) for name in ("used_memory", "maxmemory", "total_system_memory")))
