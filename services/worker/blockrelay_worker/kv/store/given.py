"""KV that clients gave with their requests: a gateway has written it to the payload Redis, each stage reads its own."""

from collections.abc import Sequence
from dataclasses import dataclass

import redis

from blockrelay.errors import RedisTrouble
from blockrelay.protocol.encoding.kv_pages import field
from blockrelay.protocol.keys import Keys


@dataclass(frozen=True, slots=True)
class Given:
    """Of consecutive pages the first is page `first` of `request`, whose client gave its first `pages`."""

    request: str
    first: int
    pages: int

    def page(self, index: int) -> int | None:
        """Which of the request's pages page `index` of these is, if it was given."""
        return self.first + index if self.first + index < self.pages else None


class GivenPages:
    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        """`client` is the payload Redis."""
        self._client, self._keys = client, keys

    def get(self, request: str, pages: Sequence[int], blocks: range) -> list[list[bytes] | None]:
        """For each page what was given for all `blocks`, unverified; None for one that is not there (any more)."""
        pipeline = self._client.pipeline(transaction=False)
        for page in pages:
            pipeline.hmget(self._keys.kv_given(request), [field(page, block - 1) for block in blocks])
        try:
            answers = pipeline.execute()
        except RedisTrouble:  # what was given is computed then
            return [None] * len(pages)
        return [None if None in records else records for records in answers]
