"""Messages that are published while we listen. None is kept for who comes later."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import redis
import redis.asyncio

from blockrelay.redis.connections import must_hold, must_hold_async
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
            await must_hold_async(subscription.connection)
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
            must_hold(subscription.connection)
            yield None if found is None else found["data"]
    finally:
        subscription.close()
