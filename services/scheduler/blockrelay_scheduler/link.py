"""The scheduler's connections to Redis."""

from dataclasses import dataclass

import redis

from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import Scripts


@dataclass(slots=True)
class SchedulerLinks:
    """Clients for the Redis servers of one cell, with its keys and Lua scripts."""

    client: redis.Redis
    """The control Redis."""
    payload: redis.Redis
    """The Redis of hidden states between stages; the same client as `client` where both share one server."""
    keys: Keys
    scripts: Scripts
    """The scripts on `client`."""
