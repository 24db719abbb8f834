"""Sends the spans of ended requests: reads their records, and hands the spans to the trace exporter."""

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol, cast

from blockrelay.errors import BlockrelayError, RedisTrouble
from blockrelay.observability import logs
from blockrelay.protocol.messages import EndEntry
from blockrelay.protocol.records.ended import decode_log, whole_record
from blockrelay.redis.client import backoff_s
from blockrelay_gateway.policy import GATEWAY_TTL_S, STEPS_SETTLE_S, THREADED_SPANS, TRACES_WAITING
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.cell_links import CellLinks
from blockrelay_gateway.streaming.records import Records
from blockrelay_gateway.tracing.spans import Span, TraceIdentity, request_spans
from blockrelay_gateway.tracing.stages import stages_of
from blockrelay_gateway.tracing.stored_steps import stored_steps


class Traces(Protocol):
    """A receiver of spans."""

    def samples(self, identity: TraceIdentity, name: str) -> bool:
        """True if the spans of this trace are wanted; `name` is the model's."""
        ...

    def send(self, identity: TraceIdentity, spans: list[Span]) -> None:
        """Takes all spans of one request. Does not wait; any thread may call it."""
        ...

    async def close(self) -> None:
        """Sends the spans that still wait, for a short time; `send` is not called any more."""
        ...


@dataclass(frozen=True, slots=True)
class _Ended:
    """An ended request; its record is read at the time `due` (the event loop's clock) or later."""

    active: ActiveRequest
    identity: TraceIdentity
    due: float


class EndedRequests:
    """Sends the spans of each ended request that is sampled.

    The gateway that accepted a request sends them; if it is gone, another gateway that has read the request's end.
    """

    def __init__(self, traces: Traces, links: CellLinks, records: Records, *, model: str) -> None:
        """`model` is the model's name in the API."""
        self._traces, self._records, self._model = traces, records, model
        self._client, self._payload, self._keys, self._watch = links.client, links.payload, links.keys, links.watch
        self._waiting: asyncio.Queue[_Ended] = asyncio.Queue(TRACES_WAITING)

    def ended(self, active: ActiveRequest) -> None:
        """Queues a request whose end this gateway has read, if it is sampled. Does not wait.

        Called in the event loop's thread. If too many requests wait already, its spans are lost, which is logged.
        """
        identity = TraceIdentity.of(active.id, active.body.traceparent)
        if not self._traces.samples(identity, self._model):
            return
        if active.owned:
            self._add(active, identity)
        else:  # only then is it clear if the gateway that accepted it still lives
            asyncio.get_running_loop().call_later(GATEWAY_TTL_S, self._add, active, identity)

    async def run(self) -> None:
        """Sends spans until cancelled, then those of the requests that still wait, for at most a second."""
        ended, loop = None, asyncio.get_running_loop()
        try:
            while True:
                ended = await self._waiting.get()
                await asyncio.sleep(ended.due - loop.time())
                await self._tell(ended.active, ended.identity)
                ended = None
        finally:
            try:
                async with asyncio.timeout(1.0):
                    if ended is not None:
                        await self._tell(ended.active, ended.identity)
                    while not self._waiting.empty():
                        ended = self._waiting.get_nowait()
                        await self._tell(ended.active, ended.identity)
            except TimeoutError:
                logs.get().warning("TRACES_LOST", requests=self._waiting.qsize() + 1)

    def _add(self, active: ActiveRequest, identity: TraceIdentity) -> None:
        due = asyncio.get_running_loop().time() + (STEPS_SETTLE_S if active.body.traced else 0.0)
        try:
            self._waiting.put_nowait(_Ended(active, identity, due))
        except asyncio.QueueFull:
            logs.get().warning("TRACES_LOST", request_id=active.id, reason="too many wait for Redis", requests=1)

    async def _tell(self, active: ActiveRequest, identity: TraceIdentity) -> None:
        """Sends the spans of one request, after as many tries as Redis needs."""
        attempt = 0
        while True:
            try:
                spans = await self._spans(active)
                self._watch.worked("read records for traces")
                break
            except RedisTrouble as error:
                self._watch.failed("read records for traces", error)
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1
            except BlockrelayError as error:  # the record cannot be read: only this request's trace is lost
                logs.get().warning("TRACES_LOST", request_id=active.id, reason=str(error), requests=1)
                return
        if len(spans) > THREADED_SPANS:
            await asyncio.to_thread(self._traces.send, identity, spans)
        elif spans:
            self._traces.send(identity, spans)

    async def _spans(self, active: ActiveRequest) -> list[Span]:
        """The spans of a request; empty if the gateway that accepted it lives and sends them, or its record is gone.

        Raises RedisTrouble, and other BlockrelayErrors for a record that cannot be read.
        """
        owner = active.body.gateway
        if not active.owned and owner and await cast(Any, self._client.exists(self._keys.gateway(owner))):
            return []
        record, log = await self._records.read(active.id, whole=False)
        entries = decode_log(log)
        if not record or not entries or not isinstance(entries[-1], EndEntry):
            return []  # forgotten meanwhile, by FORGET or by a Redis that came back without it
        whole, cell = whole_record(record, log), self._keys.cell
        spans = request_spans(active.id, whole, entries[-1], model=self._model, cell=cell)
        return [*spans, *await self._stages(active, spans, record)] if active.body.traced else spans

    async def _stages(self, active: ActiveRequest, spans: list[Span], record: dict[bytes, bytes]) -> list[Span]:
        """The spans of the stages' steps; empty if the payload Redis cannot be read."""
        try:
            steps = await stored_steps(self._payload, self._keys, active.id)
        except RedisTrouble as error:
            self._watch.count_error(error)
            return []
        return stages_of(active.id, spans, steps, record).spans
