"""Checks the records of active requests whose logs are silent.

A record that Redis lost is accepted again with the same id, seed and deadline, so the tokens are the same. An end that
only the record has is passed on, and a request past its deadline is ended.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from blockrelay.errors import RedisTrouble, RedisUnavailable
from blockrelay.observability import logs
from blockrelay.protocol.messages import EndEntry
from blockrelay.protocol.number import PROTOCOL
from blockrelay.protocol.records.ended import decode_log
from blockrelay.protocol.transitions import calls
from blockrelay_gateway.policy import GATEWAY_TTL_S, REPAIR_EVERY_S, SILENT_S
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.active_requests.gateway_lease import GatewayLease
from blockrelay_gateway.streaming.active_requests.request_registry import RequestRegistry
from blockrelay_gateway.streaming.cell_links import CellLinks
from blockrelay_gateway.streaming.log_tailer import Tailer
from blockrelay_gateway.streaming.records import Records


class LostRequestRepair:
    """The background task of a gateway that finds and repairs lost requests."""

    def __init__(
        self,
        links: CellLinks,
        tailer: Tailer,
        records: Records,
        lease: GatewayLease,
        registry: RequestRegistry,
        *,
        now_ms: Callable[[], int],
    ) -> None:
        """`now_ms` is the clock of Redis as this gateway knows it; FINISH itself decides by Redis' own."""
        self._client, self._keys, self._scripts, self._gateway = links.client, links.keys, links.scripts, links.gateway
        self._tailer, self._records, self._lease, self._registry = tailer, records, lease, registry
        self._watch, self._now_ms = links.watch, now_ms

    async def watch(self) -> None:
        """Checks requests until the task is cancelled. Redis errors are counted, and the next round tries again.

        Raises ServiceUnavailable or WireError for a record that this gateway cannot read; then it checks no more.
        """
        returned = False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REPAIR_EVERY_S):
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
        """Renews the heartbeat of this gateway, and repairs requests silent since `since` (monotonic seconds).

        It also ends overdue requests that this gateway accepted, and accepted ones whose clients were refused. It takes
        back registrations without a reader. The key and all records are one round trip, the key first: a Redis that
        stood still learns that we live before another gateway asks, and a frozen one costs one timeout, not one for
        each request.

        Raises RedisTrouble if Redis cannot be reached; its refusal for one request is counted, and the others are still
        checked. Raises ServiceUnavailable or WireError for a record that this gateway cannot read.
        """
        unfinished = self._registry.unfinished()
        silent = [active for active in unfinished if max(active.last_entry_at, active.checked) < since]
        ask = self._client.pipeline(transaction=False)
        ask.set(self._keys.gateway(self._gateway), PROTOCOL, ex=GATEWAY_TTL_S)
        for active in silent:
            ask.hget(self._keys.request(active.id), "state")
        refused, *states = await ask.execute(raise_on_error=False)
        self._watch.count(sum(isinstance(answer, RedisTrouble) for answer in (refused, *states)))
        now_ms = self._now_ms()
        overdue = [f.id for f in unfinished if f.owned and 0 < f.acceptance.deadline_ms < now_ms]
        acts = [partial(self._lease.settle, self._registry)]
        acts += [partial(self._check_record, *pair) for pair in zip(silent, states, strict=True)]
        acts += [partial(self._expire, request_id) for request_id in overdue]
        for act in acts:
            try:
                await act()
            except RedisUnavailable:
                raise
            except RedisTrouble as error:  # the other requests are still checked
                self._watch.count_error(error)

    async def _expire(self, request_id: str) -> None:
        await self._scripts.run(calls.finish(request_id, "expired"))

    async def _check_record(self, active: ActiveRequest, state: bytes | RedisTrouble | None) -> None:
        """Acts on the record of a silent request; `state` is its field of that name, None if the record is gone."""
        if isinstance(state, RedisTrouble) or active.end is not None:  # in the meantime
            return
        if state is not None:
            active.checked = time.monotonic()
            if state == b"done":
                await self._receive_an_early_end(active)
            return
        logs.get().warning("REQUEST_LOST", request_id=active.id, tokens=active.tokens)
        answer = await self._scripts.run(active.acceptance.call())
        active.checked = time.monotonic()
        if answer.status in ("OK", "EXISTS"):
            return
        lost = {"error": "the request's record is gone", "code": "gone"}
        if answer.status == "STEP":  # Redis has lost the step before, too
            body = active.body
            lost = {"error": f"session {body.session!r} expects step {answer.detail}, not {body.step}", "code": "step"}
        self._registry.receive_end(active, EndEntry(active.tokens + 1, "error", lost, (), ""))

    async def _receive_an_early_end(self, active: ActiveRequest) -> None:
        """Passes on an end that the tailer cannot bring: at a position that clients have seen (Redis lost tokens), or
        in a log that is gone. Clients get it behind all that they have seen (I8 in docs/protocol.md)."""
        record, log = await self._records.read(active.id, whole=False)
        entries = decode_log(log)
        if active.end is not None or not entries or not isinstance(entries[-1], EndEntry):
            return
        if entries[-1].position <= active.tokens:
            self._registry.receive_end(active, replace(entries[-1], position=active.tokens + 1))
        elif b"0" in record:
            self._registry.receive_all(active, entries)
