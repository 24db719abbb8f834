"""Looks after requests that this gateway follows and hears nothing of: a record that Redis lost is accepted again with
the same id, seed and deadline, so the tokens are the same; an end that Redis has is heard; an overdue one is ended."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import redis.asyncio

from blockrelay.errors import RedisTrouble, RedisUnavailable
from blockrelay.observability import logs
from blockrelay.protocol.ended import decode_log
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import EndEntry
from blockrelay.protocol.number import PROTOCOL
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import AsyncScripts
from blockrelay.redis.errors import RedisWatch
from blockrelay_gateway.streaming.following.followed_request import FollowedRequest
from blockrelay_gateway.streaming.following.followers import Followers
from blockrelay_gateway.streaming.following.registry import FollowedRequests
from blockrelay_gateway.streaming.log_tailer import Tailer
from blockrelay_gateway.streaming.records import Records

CHECK_EVERY_S = 1.0
#: A request of which nothing was heard for so long has its record looked for.
SILENT_S = 5.0
#: A gateway that has not said for so long that it lives has no readers.
GATEWAY_TTL_S = 15


class Repair:
    """Background work of a gateway, beside its tailer."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: Keys,
        scripts: AsyncScripts,
        tailer: Tailer,
        records: Records,
        followers: Followers,
        followed: FollowedRequests,
        watch: RedisWatch,
        *,
        gateway: str,
        now_ms: Callable[[], int],
    ) -> None:
        """`now_ms`: Redis' clock, as far as this gateway knows it. FINISH decides by that clock itself."""
        self._client, self._keys, self._scripts, self._tailer = client, keys, scripts, tailer
        self._records, self._followers, self._followed = records, followers, followed
        self._watch, self._gateway, self._now_ms = watch, gateway, now_ms

    async def watch(self) -> None:
        """Until cancelled: end what is past its deadline, send ACCEPT again for records that Redis lost."""
        returned = False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY_S):
                    await self._tailer.returned.wait()
            # Perhaps another Redis process, whose log may have lost its tail.
            returned |= self._tailer.returned.is_set()
            self._tailer.returned.clear()
            try:
                await self.check(time.monotonic() - (0.0 if returned else SILENT_S))
                self._watch.worked("check requests")
                returned = False
            except RedisTrouble as error:  # the next round tries again
                self._watch.failed("check requests", error)

    async def check(self, since: float) -> None:
        """Renew this gateway's key, look for the records of requests silent since `since` (monotonic), end overdue
        ones, take back what Redis has of requests without a reader.

        The key and all records are one round trip, the key first: a Redis that stood still learns that we live before
        another gateway asks, and a frozen one costs one timeout, not one for each request. Raises RedisTrouble.
        """
        unfinished = self._followed.unfinished()
        silent = [followed for followed in unfinished if max(followed.heard, followed.checked) < since]
        ask = self._client.pipeline(transaction=False)
        ask.set(self._keys.gateway(self._gateway), PROTOCOL, ex=GATEWAY_TTL_S)
        for followed in silent:
            ask.hget(self._keys.request(followed.id), "state")
        refused, *states = await ask.execute(raise_on_error=False)
        self._watch.count(sum(isinstance(answer, RedisTrouble) for answer in (refused, *states)))
        now_ms = self._now_ms()
        overdue = [f.id for f in unfinished if f.owned and 0 < f.acceptance.deadline_ms < now_ms]
        acts = [partial(self._followers.settle, self._followed)]
        acts += [partial(self._check_record, *found) for found in zip(silent, states, strict=True)]
        acts += [partial(self._expire, request) for request in overdue]
        for act in acts:
            try:
                await act()
            except RedisUnavailable:
                raise
            except RedisTrouble as error:  # the others' turn
                self._watch.met(error)

    async def _expire(self, request: str) -> None:
        await self._scripts.run(calls.finish(request, "expired"))

    async def _check_record(self, followed: FollowedRequest, state: bytes | RedisTrouble | None) -> None:
        """`state` is what the record of a silent request says."""
        if isinstance(state, RedisTrouble) or followed.end is not None:  # in the meantime
            return
        if state is not None:
            followed.checked = time.monotonic()
            if state == b"done":
                await self._hear_an_early_end(followed)
            return
        logs.get().warning("REQUEST_LOST", request_id=followed.id, tokens=followed.tokens)
        answer = await self._scripts.run(followed.acceptance.call())
        followed.checked = time.monotonic()
        if answer.status in ("OK", "EXISTS"):
            return
        lost = {"error": "the request's record is gone", "code": "gone"}
        if answer.status == "STEP":  # Redis has lost the step before, too
            body = followed.body
            lost = {"error": f"session {body.session!r} expects step {answer.detail}, not {body.step}", "code": "step"}
        self._followed.hear_end(followed, EndEntry(followed.tokens + 1, "error", lost, (), ""))

    async def _hear_an_early_end(self, followed: FollowedRequest) -> None:
        """An end at a position that we have heard (Redis lost tokens) or in a log that is gone: nobody else brings it.

        It comes after all that clients have seen (I8)."""
        record, log = await self._records.read(followed.id, whole=False)
        entries = decode_log(log)
        if followed.end is not None or not entries or not isinstance(entries[-1], EndEntry):
            return
        if entries[-1].position <= followed.tokens:
            self._followed.hear_end(followed, replace(entries[-1], position=followed.tokens + 1))
        elif b"0" in record:
            self._followed.hear_all(followed, entries)
