"""Record and log of a request, read together."""

from typing import cast

import redis.asyncio

from blockrelay.ended import Log, whole_log
from blockrelay.keys import Keys


async def read_request(
    client: redis.asyncio.Redis, keys: Keys, request: str, *, whole: bool = True
) -> tuple[dict[bytes, bytes], Log]:
    """Record and log of one moment; `whole`: else only the last entry of the log. Empty for what is not there."""
    both = client.pipeline(transaction=True)
    both.hgetall(keys.request(request))
    if whole:
        both.xrange(keys.log(request))
    else:
        both.xrevrange(keys.log(request), count=1)
    record, log = cast(tuple[dict[bytes, bytes], Log], await both.execute())
    return record, whole_log(record, log)
