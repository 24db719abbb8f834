"""Messages that are published while we listen. None is kept for who comes later."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import redis
import redis.asyncio

from blockrelay.errors import RedisUnavailable
from blockrelay.redis.connections import renew, renew_async
from blockrelay.redis.errors import translated

#: How often a subscriber hears that nothing came, so that it may look at something else. Seconds.
SILENCE_S = 0.5


async def subscribed_async(client: redis.asyncio.Redis, channel: str) -> AsyncIterator[bytes | None]:
    """The messages of a channel from now on; None at once when the subscription holds, and after every SILENCE_S
    without one. Raises RedisTrouble."""
    subscription = cast(Any, client).pubsub(ignore_subscribe_messages=True)
    try:
        with translated(client.connection_pool):
            await subscription.subscribe(channel)
        yield None
        while True:
            with translated(client.connection_pool):
                found = await subscription.get_message(timeout=SILENCE_S)
            await renew_async(subscription.connection)
            _must_be_connected(subscription)
            yield None if found is None else found["data"]
    finally:
        await subscription.aclose()


def subscribed(client: redis.Redis, channel: str) -> Iterator[bytes | None]:
    """As `subscribed_async`."""
    subscription = cast(Any, client).pubsub(ignore_subscribe_messages=True)
    try:
        with translated(client.connection_pool):
            subscription.subscribe(channel)
        yield None
        while True:
            with translated(client.connection_pool):
                found = subscription.get_message(timeout=SILENCE_S)
            renew(subscription.connection)
            _must_be_connected(subscription)
            yield None if found is None else found["data"]
    finally:
        subscription.close()


def _must_be_connected(subscription: Any) -> None:
    """Who lost a subscription because its server is not the Redis of its address any more has missed messages."""
    if not subscription.connection.is_connected:
        raise RedisUnavailable("Redis does not answer: what we were subscribed to may be another server by now")
