"""Chats that name no `max_tokens`: how far they may go, so that nobody waits or is refused for their sake.

Such a chat may use the rest of the context, and no more of any worker's KV pool than lets as many of its kind run there
as the worker runs at once (16 at least), nor more than a minute's worth of its key's tokens. Admission counts EXPECTED
new tokens for it, in the key's budget and in predictions; what it generates beyond them is charged when it ends.
"""

import time
from dataclasses import replace
from typing import Any, cast

import redis.asyncio

from blockrelay.auth.api_keys import Tenant
from blockrelay.protocol.constants import PAGE_TOKENS
from blockrelay.protocol.keys import Keys
from blockrelay_gateway.admission.admission_request import AdmissionRequest

EXPECTED = 128
"""New tokens that admission counts for a chat that names no limit; it may have as many in any case."""
AT_ONCE = 16
"""Chats of this kind fit into every pool, however few requests its worker runs at once."""
FRESH_S = 1.0
"""What was read of the pools so lately holds."""


class PoolShares:
    """How many KV pages of a worker one of its requests may have, where all that it runs at once have as many."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, *, model: str) -> None:
        """`model` is its key in Redis."""
        self._client, self._keys, self._model = client, keys, model
        self._read, self._pages = float("-inf"), 0

    async def pages(self) -> int:
        """The smallest share of any worker; 0 while there is none. Raises RedisTrouble."""
        if time.monotonic() - self._read > FRESH_S:
            self._pages = await self._look()
            self._read = time.monotonic()
        return self._pages

    async def _look(self) -> int:
        workers = cast(list[bytes], await cast(Any, self._client.zrange(self._keys.workers, 0, -1)))
        if not workers:
            return 0
        async with self._client.pipeline(transaction=False) as ask:
            for worker in workers:
                ask.hmget(self._keys.worker(worker.decode()), "model", "pages", "slots")
            told = await ask.execute()
        return min(
            (
                int(pages) // max(AT_ONCE, int(slots or 0))
                for model, pages, slots in told
                if model == self._model.encode() and pages
            ),
            default=0,
        )


def bounded(request: AdmissionRequest, tenant: Tenant, pages: int) -> AdmissionRequest:
    """`request` with the `max_tokens` that it may have: as it is where its client named some. `pages`: `PoolShares`."""
    if not request.open_ended:
        return request
    room, prompt = request.params.max_tokens, int(request.body.prompt.size)
    expected = min(EXPECTED, room)
    most = min(room, pages * PAGE_TOKENS - prompt, (tenant.tokens_per_minute or room + prompt) - prompt)
    params = replace(request.params, max_tokens=max(expected, most))
    return replace(
        request, params=params, body=replace(request.body, params=params.to_dict()), expected_tokens=expected
    )
