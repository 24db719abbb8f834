"""The requests this gateway knows to be under way: one copy of each token log, many readers, one grace period.

A flight is a hint, like everything outside the log: another gateway can read the same request from its record. It lives
from ACCEPT (or the first reader that resumes) to the terminal entry or to its last reader, whichever is later. While it
lives it is also what repairs a record that Redis lost: same id, seed and deadline, so the same tokens.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import redis.asyncio

from blockrelay.errors import NotFound, RedisTrouble, RedisUnavailable
from blockrelay.observability import logs
from blockrelay.observability.metrics import GatewayMetrics
from blockrelay.protocol import transitions as calls
from blockrelay.protocol.ended import Log, body_of, decode_log
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import EndEntry, LogEntry, RequestBody, TokenEntry
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.protocol.transitions import Accepted, Call
from blockrelay.redis.client import AsyncScripts, backoff_s
from blockrelay.redis.errors import RedisWatch
from blockrelay_gateway.streaming.deltas import failure
from blockrelay_gateway.streaming.followers import Followers
from blockrelay_gateway.streaming.log_tailer import Tailer
from blockrelay_gateway.streaming.records import check_visible, read_request

CHECK_EVERY_S = 1.0
#: A flight that has heard nothing for so long looks whether its record is still there.
SILENT_S = 5.0
#: From the moment that a client asks for a request until it is one of its readers, at most.
SOUGHT_S = 5.0
#: A gateway that has not said for so long that it lives has no readers.
GATEWAY_TTL_S = 15
#: ACCEPT but for its `max_in_flight`.
Accept = Callable[..., Call[Accepted]]
#: What was accepted once is never refused.
NO_LIMIT = 2**31


@dataclass(slots=True, eq=False)
class Flight:
    """One request under way. `entries` are all log entries so far: TokenEntry 1..n, then one EndEntry."""

    request: str
    body: RequestBody
    params: SamplingParams
    created: int  # Unix seconds
    accept: Accept
    owned: bool = True  # accepted by this gateway, which counts it
    tenant: str = ""
    deadline_ms: int = 0  # 0: none
    started: float = field(default_factory=time.monotonic)
    entries: list[LogEntry] = field(default_factory=list[LogEntry])
    end: EndEntry | None = None
    numerics: str = ""
    readers: int = 0
    heard: float = field(default_factory=time.monotonic)  # the last entry
    checked: float = field(default_factory=time.monotonic)  # the last look at the record
    events: set[asyncio.Event] = field(default_factory=set[asyncio.Event])
    grace: asyncio.TimerHandle | None = None
    sought: float = float("-inf")  # somebody asked for it, and will perhaps read
    leaving: bool = False  # nobody reads it: FINISH is under way, or done

    @property
    def tokens(self) -> int:
        """Committed so far."""
        return len(self.entries) - (self.end is not None)


class Flights:
    """All flights of this gateway."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: Keys,
        scripts: AsyncScripts,
        tailer: Tailer,
        metrics: GatewayMetrics,
        watch: RedisWatch,
        *,
        gateway: str,
        model: str,
        grace_s: float,
        retention_s: int,
    ) -> None:
        self._client, self._keys, self._scripts = client, keys, scripts
        self._tailer, self._metrics, self._watch, self._gateway = tailer, metrics, watch, gateway
        self.followers = Followers(client, keys, scripts, gateway, retention_s)
        self._model, self._grace_s = model, grace_s
        self._flights: dict[str, Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.closing = False

    def __len__(self) -> int:
        return len(self._flights)

    def start(self, flight: Flight) -> None:
        """Follow its log. Before ACCEPT, so that no entry has to wait for a second read."""
        self._flights[flight.request] = flight
        self._metrics.waiting.inc()
        self._tailer.follow(flight.request, lambda entry: self._hear(flight, entry))

    def drop(self, flight: Flight) -> None:
        """Forget a flight that was refused, unless somebody reads it."""
        if self._flights.get(flight.request) is not flight or flight.readers:
            return
        self._tailer.forget(flight.request)
        del self._flights[flight.request]
        if flight.end is None:
            (self._metrics.running if flight.tokens else self._metrics.waiting).dec()

    async def recorded(self, requests: Sequence[str]) -> bool:
        """Whether all of them are accepted already."""
        names = [self._keys.request(request) for request in requests]
        return len(names) == await cast(Any, self._client.exists(*names))

    def join(self, flight: Flight) -> Flight:
        """Follow a request whose id derives from a key, behind its ACCEPT: somebody else may follow it already."""
        known = self._flights.get(flight.request)
        if known is not None and known.end is None:
            if known.readers or not known.leaving:
                return known
            self.drop(known)
        self.start(flight)
        return flight

    def seek(self, request: str) -> None:
        """Somebody asks for this request: who is about to give it up waits for what comes of that."""
        if known := self._flights.get(request):
            known.sought = time.monotonic()

    async def resume(self, request: str, tenant: str) -> Flight:
        """The flight of any request of this tenant, from any gateway; this one answers for its readers from now on.

        Raises NotFound when there is no such record (any more), or when it is of another tenant or model.
        """
        self.seek(request)
        if known := self.known(request):
            check_visible(request, (self._model.encode(), known.tenant.encode()), model=self._model, tenant=tenant)
        else:
            recorded = await cast(Any, self._client.hmget(self._keys.request(request), "model", "tenant"))
            check_visible(request, recorded, model=self._model, tenant=tenant)
        async with self.followers.joining(request):
            return await self._read(request, tenant)

    async def _read(self, request: str, tenant: str) -> Flight:
        if known := self.known(request):
            return known
        record, log = await read_request(self._client, self._keys, request, whole=False)
        if not record:
            await self._client.delete(self._keys.followers(request))
            raise NotFound(f"request {request} is unknown or was forgotten after its retention", param="id")
        body = body_of(record, log)
        if body.gateway:
            await self.followers.add(request, body.gateway)  # it did not know that it would not be the only one
        if known := self.known(request):  # somebody resumed it while we were reading
            return known
        accept = partial(
            calls.accept,
            request,
            body,
            model=self._model,
            need_pages=int(record.get(b"need", b"0")),
            deadline_ms=int(record.get(b"deadline", b"0")),
            fingerprint=record.get(b"fp", b"").decode(),
            keep_s=int(record.get(b"keep", b"0")),
            tenant=tenant,
        )
        flight = Flight(
            request=request,
            body=body,
            params=SamplingParams.from_dict(body.params),
            created=int(record[b"accepted"]) // 1000,
            accept=accept,
            owned=False,
            tenant=tenant,
            numerics=record.get(b"numerics", b"").decode(),
        )
        self.start(flight)
        if record[b"state"] == b"done" and b"0" in record:
            self._hear_all(flight, log)
        return flight

    def known(self, request: str) -> Flight | None:
        """The flight, unless it ended badly: an abandoned request may have begun anew on another gateway."""
        flight = self._flights.get(request)
        return None if flight is None or (flight.end is not None and failure(flight.end) is not None) else flight

    async def numerics(self, flight: Flight) -> str:
        """The numerics id of the run so far; "" before the first claim."""
        if not flight.numerics:
            with suppress(RedisTrouble):
                value = await cast(Any, self._client.hget(self._keys.request(flight.request), "numerics"))
                flight.numerics = (value or b"").decode()
        return flight.numerics

    def attach(self, flight: Flight) -> None:
        """One more reader."""
        flight.readers += 1
        if flight.grace is not None:
            flight.grace.cancel()
            flight.grace = None

    def detach(self, flight: Flight) -> None:
        """One reader less; the last one of an unfinished request starts its grace period."""
        flight.readers -= 1
        if flight.end is not None:
            self._retire(flight)
        elif flight.readers == 0 and not self.closing and not flight.body.background:
            self._metrics.disconnected.inc()
            logs.get().info("CLIENT_DISCONNECTED", request_id=flight.request, tokens=flight.tokens)
            flight.grace = asyncio.get_running_loop().call_later(self._grace_s, self._give_up, flight)

    def close(self) -> None:
        """The gateway ends: readers get an error that tells where to go on; the requests themselves go on."""
        self.closing = True
        for flight in self._flights.values():
            if flight.grace is not None:
                flight.grace.cancel()
            for event in flight.events:
                event.set()
        for task in self._tasks:
            task.cancel()

    async def watch(self) -> None:
        """Until cancelled: end what is past its deadline, send ACCEPT again for records that Redis lost."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY_S):
                    await self._tailer.returned.wait()
            returned = self._tailer.returned.is_set()  # perhaps another Redis process, whose log may have lost its tail
            self._tailer.returned.clear()
            try:
                await self.check(time.monotonic() - (0.0 if returned else SILENT_S))
                self._watch.worked("check requests")
            except RedisTrouble as error:  # the next round tries again
                self._watch.failed("check requests", error)

    async def check(self, since: float) -> None:
        """Renew this gateway's key, look for the records of flights silent since `since` (monotonic), end overdue ones.

        The key and all records are one round trip, the key first: a Redis that stood still learns that we live before
        another gateway asks, and a frozen one costs one timeout, not one for each flight. Raises RedisTrouble.
        """
        flights = [flight for flight in self._flights.values() if flight.end is None]
        silent = [flight for flight in flights if max(flight.heard, flight.checked) < since]
        ask = self._client.pipeline(transaction=False)
        ask.set(self._keys.gateway(self._gateway), "", ex=GATEWAY_TTL_S)
        for flight in silent:
            ask.hget(self._keys.request(flight.request), "state")
        refused, *states = await ask.execute(raise_on_error=False)
        self._metrics.redis_errors.inc(sum(isinstance(answer, RedisTrouble) for answer in (refused, *states)))
        overdue = [flight.request for flight in flights if 0 < flight.deadline_ms < time.time() * 1000]
        acts = [self.settle, *(partial(self._check_record, *found) for found in zip(silent, states, strict=True))]
        for act in (*acts, *(partial(self._scripts.run, calls.finish(request, "expired")) for request in overdue)):
            try:
                await act()
            except RedisUnavailable:
                raise
            except RedisTrouble as error:  # the others' turn
                self._watch.met(error)

    async def settle(self) -> None:
        """Take back what Redis has of requests that nobody reads here or that were refused. Raises RedisTrouble."""
        await self.followers.settle(self._flights)

    async def _check_record(self, flight: Flight, state: bytes | RedisTrouble | None) -> None:
        """`state` is what the record of a silent flight says."""
        if isinstance(state, RedisTrouble) or flight.end is not None:  # in the meantime
            return
        if state is not None:
            flight.checked = time.monotonic()
            if state == b"done":
                await self._hear_an_early_end(flight)
            return
        logs.get().warning("REQUEST_LOST", request_id=flight.request, tokens=flight.tokens)
        answer = await self._scripts.run(flight.accept(max_in_flight=NO_LIMIT))
        flight.checked = time.monotonic()
        if answer.status not in ("OK", "EXISTS"):
            self._tailer.forget(flight.request)
            gone = {"error": "the request's record is gone", "code": "gone"}
            self._hear(flight, EndEntry(flight.tokens + 1, "error", gone, (), ""))

    async def _hear_an_early_end(self, flight: Flight) -> None:
        """An end at a position that we have heard (Redis lost tokens) or in a log that is gone: nobody else brings it.

        It stands behind all that clients have seen (I8)."""
        record, log = await read_request(self._client, self._keys, flight.request, whole=False)
        entries = decode_log(log)
        if flight.end is not None or not entries or not isinstance(entries[-1], EndEntry):
            return
        if entries[-1].position <= flight.tokens:
            self._tailer.forget(flight.request)
            self._hear(flight, replace(entries[-1], position=flight.tokens + 1))
        elif b"0" in record:
            self._hear_all(flight, log)

    def _hear_all(self, flight: Flight, log: Log) -> None:
        """Hear what is new in a whole log, which may no longer be where the tailer reads."""
        self._tailer.forget(flight.request)
        for entry in decode_log(log):
            if entry.position > flight.tokens and flight.end is None:
                self._hear(flight, entry)

    def _hear(self, flight: Flight, entry: LogEntry) -> None:
        now, metrics, owned = time.monotonic(), self._metrics, flight.owned
        if isinstance(entry, TokenEntry):
            if not flight.entries:
                metrics.waiting.dec()
                metrics.running.inc()
                if owned:
                    metrics.time_to_first_token.observe(now - flight.started)
            elif owned:
                metrics.inter_token_latency.observe(now - flight.heard)
            if owned:
                metrics.generation_tokens.inc()
        else:
            (metrics.running if flight.entries else metrics.waiting).dec()
            flight.end, flight.numerics = entry, entry.numerics or flight.numerics
        flight.entries.append(entry)
        flight.heard = now
        if flight.end is not None and owned:
            self._account(flight, flight.end, now)
        for event in flight.events:
            event.set()
        if flight.end is not None:
            self._retire(flight)

    def _account(self, flight: Flight, end: EndEntry, now: float) -> None:
        self._metrics.requests.labels(end.reason).inc()
        self._metrics.e2e_latency.observe(now - flight.started)
        log = logs.get().bind(request_id=flight.request, traceparent=flight.body.traceparent or None)
        if flight.body.session:
            log = log.bind(session_id=flight.body.session, step=flight.body.step)
        for event in end.fallbacks:
            self._metrics.fallbacks.labels(event.block_id, event.source, event.target, event.reason).inc()
            moved: dict[str, Any] = {"block": event.block_id, "from": event.source, "to": event.target}
            log.warning("BLOCK_EXECUTION_FALLBACK", **moved, reason=event.reason, success=event.success)
        log.info(
            "PIPELINE_EXECUTION_COMPLETE",
            reason=end.reason,
            tokens=flight.tokens,
            time=round(now - flight.started, 6),
            fallbacks=len(end.fallbacks),
            error=end.meta.get("error"),
        )

    def _retire(self, flight: Flight) -> None:
        if flight.grace is not None:
            flight.grace.cancel()
            flight.grace = None
        if flight.readers == 0 and self._flights.get(flight.request) is flight:
            del self._flights[flight.request]

    def _give_up(self, flight: Flight) -> None:
        flight.grace = None
        task = asyncio.get_running_loop().create_task(self._cancel(flight), name=f"grace-{flight.request}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cancel(self, flight: Flight) -> None:
        """The grace period is over: cancel, unless a reader came back here or reads at another gateway that lives."""
        attempt = 0
        while flight.end is None and flight.readers == 0:
            try:
                if await self._cancelled(flight):
                    return
                attempt = 0
                await asyncio.sleep(max(self._grace_s, CHECK_EVERY_S))
            except RedisTrouble as error:
                self._watch.met(error)
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1

    async def _cancelled(self, flight: Flight) -> bool:
        """Whether the request has ended: FINISH, which looks for followers itself, said so. We are none any more."""
        await self.followers.remove(flight.request)
        if flight.readers or time.monotonic() - flight.sought < SOUGHT_S:
            await self.followers.add(flight.request, self._gateway)
            return False
        flight.leaving = True
        try:
            call = calls.finish(flight.request, "cancelled", meta={"error": "no reader"}, abandoned=True)
            answer = await self._scripts.run(call)
        except RedisTrouble:
            flight.leaving = False  # if it did run, its end is in the log
            raise
        flight.leaving = answer != "READ"
        if not flight.leaving:
            logs.get().info("READER_ELSEWHERE", request_id=flight.request)
        return flight.leaving
