"""Reads the steps that stages have recorded for a request from the payload Redis."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import redis.asyncio

from blockrelay.errors import WireError
from blockrelay.observability import logs
from blockrelay.protocol.encoding.stage_span import StageSpan
from blockrelay.protocol.keys import Keys

_Entries = Sequence[tuple[bytes, Mapping[bytes, bytes]]]


async def stored_steps(payload: redis.asyncio.Redis, keys: Keys, request_id: str) -> list[StageSpan]:
    """The steps in the order in which they were written; empty if they are gone. Raises RedisTrouble.

    A step that cannot be decoded is logged and left out.
    """
    entries = cast(_Entries, await cast(Any, payload.xrange(keys.trace(request_id))))
    return await asyncio.to_thread(_decode, request_id, entries) if entries else []


def _decode(request_id: str, entries: _Entries) -> list[StageSpan]:
    steps: list[StageSpan] = []
    for _, fields in entries:
        try:
            steps.append(StageSpan.decode(fields))
        except WireError as error:  # the step counts as missing, as if it had never been written
            logs.get().warning("STAGE_SPAN_REFUSED", request_id=request_id, error=str(error))
    return steps
