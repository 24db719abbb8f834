"""What KEDA's `redis` trigger asks a Redis, as the user that deploy/redis has for it."""

from typing import Any

import redis

from blockrelay.protocol.keys import Keys
from blockrelay.redis.users import CELL, rules

#: As KEDA's documentation of the trigger has it: the length by the type of the key; where there is no key, of a list.
COUNT = """
local kind = redis.call('TYPE', KEYS[1])['ok']
local length = { list = 'LLEN', none = 'LLEN', set = 'SCARD', zset = 'ZCARD', hash = 'HLEN' }
return redis.call(length[kind], KEYS[1])
"""


def keda(admin: redis.Redis, keys: Keys) -> redis.Redis:
    """A client of the user `keda` of deploy/redis, whose file is for the cell `c0`, with the rights to `keys` instead.

    The caller closes it.
    """
    (rule,) = [line for line in rules("control") if line.startswith("user keda ")]
    _, name, on, _, *rights = rule.replace(f"{{{CELL}}}", f"{{{keys.cell}}}").split()
    admin.execute_command("ACL", "SETUSER", name, "reset", on, ">secret", *rights)
    options: dict[str, Any] = {**admin.connection_pool.connection_kwargs, "username": name, "password": "secret"}
    pool = redis.ConnectionPool(connection_class=admin.connection_pool.connection_class, **options)
    return type(admin).from_pool(pool)


def unfinished(client: redis.Redis, keys: Keys) -> int:
    """The number that KEDA sees."""
    return int(client.eval(COUNT, 1, keys.running))  # pyright: ignore[reportArgumentType]
