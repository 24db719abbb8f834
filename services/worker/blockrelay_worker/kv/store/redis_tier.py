"""The Redis tier, shared by a cell: one hash per page on the payload Redis, with a field per block.

The sorted set `pages:<model>` has them by last use. Its length times the bytes of one page over all blocks counts
against the limit, so that a page whose blocks come from several stages counts once.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import redis

from blockrelay.errors import RedisFull, RedisTrouble
from blockrelay.protocol.keys import Keys
from blockrelay.redis.errors import CommandError
from blockrelay_worker.kv.store.tier import StoredPage, TierFailure
from blockrelay_worker.policy import HOLD_S, STORE_PAUSE_S


class RedisTier:
    """A tier of at most `limit` bytes of one model's pages. Redis drops pages that were not used for `ttl_s` seconds.

    Implements `Tier`. `trouble` is called for each failure; no method raises for one. After a failure the tier pauses:
    it stores and finds nothing for STORE_PAUSE_S seconds.
    """

    label = "redis"

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        *,
        model: str,
        limit: int,
        page_bytes: int,
        ttl_s: int,
        trouble: Callable[[TierFailure], None],
    ) -> None:
        """`client` is connected to the payload Redis; `model` is the model's key there.

        `page_bytes`: bytes of the records of one page over all blocks of the model.
        """
        self._client, self._keys, self._index = client, keys, keys.pages(model)
        self._max_pages = limit // page_bytes
        self._page_bytes, self._ttl_ms, self._trouble = page_bytes, ttl_s * 1000, trouble
        self._pages = 0
        self._paused_until = 0.0

    def may_have(self, block_hash: bytes) -> bool:
        """Returns False during a pause after a failure, True otherwise."""
        return time.monotonic() >= self._paused_until  # only Redis knows

    def get(self, hashes: Sequence[bytes], blocks: range) -> list[list[bytes] | None]:
        """Returns for each page the records of all `blocks`, unverified; None if one is missing. Counts as a use.

        All are None if Redis fails, and during a pause.
        """
        fields = [str(block) for block in blocks]
        pipeline = self._client.pipeline(transaction=False)
        for block_hash in hashes:
            pipeline.hmget(self._keys.page(block_hash.hex()), fields)
        answers = self._ask(pipeline)
        if answers is None:
            return [None] * len(hashes)
        pages = [cast(list[bytes], records) if None not in records else None for records in answers]
        self._used([block_hash for block_hash, records in zip(hashes, pages, strict=True) if records is not None])
        return pages

    def put(self, pages: Sequence[StoredPage], blocks: range) -> None:
        """Stores the pages of which the first of `blocks` is not there; then evicts the least recently used ones beyond
        the limit. Does nothing if the limit is less than one page."""
        if not self._max_pages:
            return
        pipeline = self._client.pipeline(transaction=False)
        for page in pages:
            pipeline.hexists(self._keys.page(page.block_hash.hex()), str(blocks[0]))
        known = self._ask(pipeline)
        if known is None:
            return
        new = [page for page, there in zip(pages, known, strict=True) if not there]
        pipeline = self._client.pipeline(transaction=False)
        now = time.time_ns() // 1_000_000
        for page in new:
            key = self._keys.page(page.block_hash.hex())
            pipeline.zadd(self._index, {key: now})  # first: a page outside the index would never be evicted
            for block, record in zip(blocks, page.records, strict=True):
                pipeline.hsetnx(key, str(block), cast(Any, record))
            pipeline.pexpire(key, self._ttl_ms)
        if new:
            pipeline.pexpire(self._index, self._ttl_ms)
            pipeline.zremrangebyscore(self._index, "-inf", now - self._ttl_ms)
            pipeline.zcard(self._index)
            answers = self._ask(pipeline)
            if answers is not None:
                self._pages = answers[-1]
                self._make_room()

    def hold(self, hashes: Sequence[bytes], blocks: range) -> list[bool]:
        """Holds those of the pages that are there with the first and the last of `blocks`; returns which they are.

        Holds none during a pause.
        """
        now = time.time_ns() // 1_000_000
        ask = self._client.pipeline(transaction=False)
        ask.zcount(self._index, f"({now}", "+inf")
        for block_hash in hashes:
            for block in (blocks[0], blocks[-1]):
                ask.hexists(self._keys.page(block_hash.hex()), str(block))
        answers = self._ask(ask)
        if answers is None:
            return [False] * len(hashes)
        held, *there = answers
        room, keep = self._max_pages // 2 - held, dict[str, float]()
        for index, block_hash in enumerate(hashes):
            if all(there[2 * index : 2 * index + 2]) and len(keep) < room:
                keep[self._keys.page(block_hash.hex())] = now + HOLD_S * 1000 - index / 1000
        if keep:
            tell = self._client.pipeline(transaction=False)
            tell.zadd(self._index, cast(Any, keep), xx=True)
            for key in (self._index, *keep):
                tell.pexpire(key, self._ttl_ms + int(HOLD_S * 1000))
            self._ask(tell)
        return [self._keys.page(block_hash.hex()) in keep for block_hash in hashes]

    def let_go(self, hashes: Sequence[bytes], blocks: range) -> None:
        """Ends the holding of these pages, which count as used now. Does nothing during a pause."""
        self._used(hashes)

    def discard(self, block_hash: bytes, blocks: range) -> None:
        """Removes the page with all its blocks, not only `blocks`. Does nothing during a pause."""
        key = self._keys.page(block_hash.hex())
        pipeline = self._client.pipeline(transaction=False)
        pipeline.unlink(key)
        pipeline.zrem(self._index, key)
        self._ask(pipeline)

    def used_bytes(self) -> int:
        """Bytes of all pages in the tier, as of the last `put` of this process that stored a page; 0 before.

        Each page counts with all its blocks.
        """
        return self._pages * self._page_bytes

    def _used(self, hashes: Sequence[bytes]) -> None:
        """Records the use of pages, later ones a little earlier: without the first ones they are worthless."""
        if not hashes:
            return
        now = time.time_ns() / 1e6
        scores = {self._keys.page(block_hash.hex()): now - index / 1000 for index, block_hash in enumerate(hashes)}
        pipeline = self._client.pipeline(transaction=False)
        pipeline.zadd(self._index, cast(Any, scores), xx=True)
        pipeline.pexpire(self._index, self._ttl_ms)
        for key in scores:
            pipeline.pexpire(key, self._ttl_ms)
        self._ask(pipeline)

    def _make_room(self) -> None:
        over = self._pages - self._max_pages
        if over <= 0:
            return
        popped = self._ask(self._client.pipeline(transaction=False).zpopmin(self._index, over))
        if popped:
            self._ask(self._client.pipeline(transaction=False).unlink(*(key for key, _ in popped[0])))
            self._pages -= len(popped[0])

    def _ask(self, pipeline: Any) -> list[Any] | None:
        """Returns the pipeline's answers; None during a pause, or if Redis fails, which is counted and begins one."""
        if not self.may_have(b""):
            return None
        try:
            return cast(list[Any], pipeline.execute())
        except RedisFull:
            self._trouble("full")
        except RedisTrouble:
            self._trouble("unreachable")
        except CommandError:  # a key of another type: a user has changed it by hand, and this is only a cache
            self._trouble("full")
        self._paused_until = time.monotonic() + STORE_PAUSE_S
        return None
