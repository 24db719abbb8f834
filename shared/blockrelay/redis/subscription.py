"""Subscriptions to a pub/sub channel. Messages published before the subscription are not seen."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import redis
import redis.asyncio

from blockrelay.redis.connections import must_hold, must_hold_async
from blockrelay.redis.errors import translated

#: Seconds without a message after which a subscription yields None, so that its user can do something else.
SILENCE_S = 0.5


async def subscribed_async(client: redis.asyncio.Redis, channel: str) -> AsyncIterator[bytes | None]:
    """Yields the messages of a channel from now on.

    Raises RedisTrouble, also when the connection may be to a wrong server: messages may have been missed then.
    Yields None once when the subscription is active, and after every SILENCE_S without a message. It never ends by
    itself; closing the generator ends the subscription.
    """
    subscription = cast(Any, client).pubsub(ignore_subscribe_messages=True)
    try:
        with translated(client.connection_pool):
            await subscription.subscribe(channel)
        yield None
        while True:
            with translated(client.connection_pool):
                message = await subscription.get_message(timeout=SILENCE_S)
            await must_hold_async(subscription.connection)
            yield None if message is None else message["data"]
    finally:
        await subscription.aclose()


def subscribed(client: redis.Redis, channel: str) -> Iterator[bytes | None]:
    """Yields messages and None as `subscribed_async` does, on a synchronous client."""
    subscription = cast(Any, client).pubsub(ignore_subscribe_messages=True)
    try:
        with translated(client.connection_pool):
            subscription.subscribe(channel)
        yield None
        while True:
            with translated(client.connection_pool):
                message = subscription.get_message(timeout=SILENCE_S)
            must_hold(subscription.connection)
            yield None if message is None else message["data"]
    finally:
        subscription.close()
