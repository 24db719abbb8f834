"""The scheduler's connections."""

from dataclasses import dataclass

import redis

from blockrelay.protocol.keys import Keys
from blockrelay.redis.client import Scripts


@dataclass(slots=True)
class Link:
    """A connection and the scripts on it. `payload` is the same client when rows share the control Redis."""

    client: redis.Redis
    payload: redis.Redis
    keys: Keys
    scripts: Scripts
