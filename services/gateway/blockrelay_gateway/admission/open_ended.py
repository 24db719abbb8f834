"""Limits the new tokens of chats that name no `max_tokens`, so that they take no room from other requests.

Such a chat may use the rest of the context. Prompt and new tokens together are at most the smallest share of a KV pool
(the pool divided by the worker's requests at once, at least 16), and at most one minute's tokens of its key. It always
gets EXPECTED_TOKENS new tokens if context and settings have room for them. Admission counts as many for it, in the
key's budget and in predictions; what it generates beyond them is charged when it ends.
"""

import time
from dataclasses import replace
from typing import Any, cast

from blockrelay.auth.api_keys import Tenant
from blockrelay.protocol.constants import PAGE_TOKENS
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.policy import EXPECTED_TOKENS, OPEN_ENDED_AT_ONCE, POOLS_FRESH_S
from blockrelay_gateway.streaming.cell_links import CellLinks


class PoolShares:
    """Reads how many KV pages of a worker one open-ended request may have: an equal share for each of its requests."""

    def __init__(self, links: CellLinks) -> None:
        self._client, self._keys, self._model = links.client, links.keys, links.model
        self._read, self._pages = float("-inf"), 0

    async def pages(self) -> int:
        """The smallest share of any worker of the model, in KV pages; 0 without a worker of the model.

        It is read again after POOLS_FRESH_S seconds. Raises RedisTrouble.
        """
        if time.monotonic() - self._read > POOLS_FRESH_S:
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
            registrations = await ask.execute()
        return min(
            (
                int(pages) // max(OPEN_ENDED_AT_ONCE, int(slots or 0))
                for model, pages, slots in registrations
                if model == self._model.encode() and pages
            ),
            default=0,
        )


def bounded(request: AdmissionRequest, tenant: Tenant, pages: int) -> AdmissionRequest:
    """Returns `request` with the `max_tokens` and `expected_tokens` that it may have.

    A request whose client named a limit is returned unchanged. In others `max_tokens` is the rest of the context, as
    settings limit it. `pages` is the share in KV pages, from `PoolShares`; 0 leaves EXPECTED_TOKENS. `max_tokens` never
    becomes less than EXPECTED_TOKENS, unless it was less before.
    """
    if not request.open_ended:
        return request
    room, prompt = request.params.max_tokens, int(request.body.prompt.size)
    expected = min(EXPECTED_TOKENS, room)
    limit = min(room, pages * PAGE_TOKENS - prompt, (tenant.tokens_per_minute or room + prompt) - prompt)
    params = replace(request.params, max_tokens=max(expected, limit))
    return replace(
        request, params=params, body=replace(request.body, params=params.to_dict()), expected_tokens=expected
    )
