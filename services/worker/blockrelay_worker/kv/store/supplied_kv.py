"""KV that clients supplied with their requests: a gateway wrote it to the payload Redis, each stage reads its part."""

from collections.abc import Sequence

import redis

from blockrelay.errors import RedisTrouble
from blockrelay.protocol.encoding.kv_pages import field
from blockrelay.protocol.keys import Keys


class SuppliedPages:
    """Reads client-supplied KV from the payload Redis."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        """`client` is connected to the payload Redis."""
        self._client, self._keys = client, keys

    def get(self, request_id: str, pages: Sequence[int], blocks: range) -> list[list[bytes] | None]:
        """For each page its supplied KV, one unverified bytes object per block in `blocks`.

        `pages` are indexes in the request, from 0; blocks count from 1. None for a page that is missing for any block,
        and for all pages if Redis does not answer.
        """
        pipeline = self._client.pipeline(transaction=False)
        for page in pages:
            pipeline.hmget(self._keys.kv_given(request_id), [field(page, block - 1) for block in blocks])
        try:
            answers = pipeline.execute()
        except RedisTrouble:  # the pages are computed instead
            return [None] * len(pages)
        return [None if None in records else records for records in answers]
