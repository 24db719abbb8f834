"""What a Redis says of its memory."""

from typing import Any, NamedTuple, cast

import redis.asyncio


class Memory(NamedTuple):
    """Bytes: in use, the most that may be (0: no limit), and what the machine has."""

    used: int
    most: int
    machine: int


async def read_memory(client: redis.asyncio.Redis) -> Memory:
    """Raises RedisTrouble."""
    said = cast(dict[str, Any], await cast(Any, client.info("memory")))
    return Memory(*(int(said.get(name, 0)) for name in ("used_memory", "maxmemory", "total_system_memory")))
