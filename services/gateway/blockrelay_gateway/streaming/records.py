"""Record and log of a request, read together."""

from collections.abc import Sequence
from typing import cast

import redis.asyncio

from blockrelay.errors import NotFound, ServiceUnavailable
from blockrelay.protocol.ended import Log, whole_log
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.number import PROTOCOL


async def read_request(
    client: redis.asyncio.Redis, keys: Keys, request: str, *, whole: bool = True
) -> tuple[dict[bytes, bytes], Log]:
    """Record and log of one moment; `whole`: else only the last entry of the log. Empty for what is not there.

    Raises ServiceUnavailable for a record of a later protocol.
    """
    both = client.pipeline(transaction=True)
    both.hgetall(keys.request(request))
    if whole:
        both.xrange(keys.log(request))
    else:
        both.xrevrange(keys.log(request), count=1)
    record, log = cast(tuple[dict[bytes, bytes], Log], await both.execute())
    if (number := int(record.get(b"v", 0))) > PROTOCOL:
        raise ServiceUnavailable(
            f"request {request} was accepted under protocol {number} of the cell, and this gateway speaks {PROTOCOL}"
        )
    return record, whole_log(record, log)


def check_visible(name: str, recorded: Sequence[bytes | None], *, model: str, tenant: str) -> None:
    """Raise NotFound for a request of another tenant, in the words for one that never was, and for one of another model
    of the cell: with our tokenizer its tokens would read as nonsense.

    `name` is the client's id of the request, `recorded` its record's model and tenant (no model: there is no record),
    `model` the key of ours.
    """
    if recorded[0] is None or (recorded[1] or b"").decode() != tenant:
        raise NotFound(f"request {name} is unknown or was forgotten after its retention", param="id")
    if recorded[0].decode() != model:
        raise NotFound(f"request {name} is for another model than the one that this gateway serves", param="id")
