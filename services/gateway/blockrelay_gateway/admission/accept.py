"""Orders to flights: ACCEPT with its limits, and nothing else that writes.

A refused order leaves nothing behind: limits are checked by the script before its first write, and of several prompts
of one HTTP request either all are accepted or none.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import redis.asyncio

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import (
    BadRequest,
    Conflict,
    KeyReused,
    NotFound,
    Overloaded,
    RedisFull,
    RedisRefused,
    RedisTrouble,
    RedisUnavailable,
    ServiceUnavailable,
)
from blockrelay.observability import logs
from blockrelay.observability.metrics import GatewayMetrics
from blockrelay.protocol import transitions as calls
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.transitions import NO_LIMITS, Accepted, Limits
from blockrelay.redis.cell_settings import CellSettings, read_cell_settings_async
from blockrelay.redis.client import AsyncScripts, backoff_s
from blockrelay.redis.errors import RedisWatch
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission.idempotency import HEADER
from blockrelay_gateway.admission.limits import limit_error, limits_for, priority_of
from blockrelay_gateway.admission.order import Order
from blockrelay_gateway.admission.redis_memory import read_memory
from blockrelay_gateway.admission.tensor_results import Results
from blockrelay_gateway.http.retry_after import retry_after_s
from blockrelay_gateway.streaming.followed_requests import NO_LIMIT, Flight, Flights
from blockrelay_gateway.streaming.readers import Readers

PAGE_TOKENS = 16
#: Share of Redis' maxmemory above which nothing new is accepted: COMMIT must always fit.
FULL_SHARE = 0.70
#: Share above which what has ended is forgotten, in bites of so many, so many at one look.
YIELD_SHARE, BITE, BITES = 0.50, 128, 64
POLL_S = 1.0
#: Whoever would be refused for want of memory has it looked at again, unless that was done so lately.
LOOKED_S = 0.1
#: Memory comes back when requests end.
MEMORY_RETRY_MS = 5000
#: ACCEPT is idempotent by request id, so a lost connection is no reason to give up at once.
RETRY_FOR_S = 3.0


def need_pages(order: Order) -> int:
    """KV pages of one block that the request may fill."""
    return -(-(order.body.prompt.size + order.params.max_tokens) // PAGE_TOKENS)


def scoped_session(tenant: str, session: str) -> str:
    """The session's name in Redis: no tenant finds another's. Names that clients give have no slash."""
    return f"{tenant}/{session}" if tenant else session


def scoped_salt(tenant: str, salt: str) -> str:
    """The salt of page names: no tenant finds another's pages. Salts that clients give have no NUL."""
    return f"{tenant}\0{salt}" if tenant else salt


def scoped(order: Order, tenant: Tenant) -> Order:
    """`order` in the tenant's own name space."""
    body = replace(order.body, salt=scoped_salt(tenant.name, order.body.salt))
    session = order.session
    if session is not None:
        session = replace(session, session=scoped_session(tenant.name, session.session))
    return replace(order, body=body, session=session)


class Admission:
    """The only caller of ACCEPT."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        scripts: AsyncScripts,
        flights: Flights,
        results: Results,
        metrics: GatewayMetrics,
        watch: RedisWatch,
        *,
        gateway: str,
        model: str,
        blocks: int,
        settings: GatewaySettings,
    ) -> None:
        """`blocks`: of the model, for the log."""
        self._client, self._scripts, self._flights, self._results = client, scripts, flights, results
        self._metrics, self._watch = metrics, watch
        self._gateway, self._model, self._blocks, self._settings = gateway, model, blocks, settings
        self._cell = CellSettings.of(settings)
        self._full = ""
        self._looked = float("-inf")
        self._clock_ahead_ms = 0  # of Redis, whose clock decides about deadlines

    async def watch(self) -> None:
        """Until cancelled: keep an eye on Redis' memory and clock, and on the settings of the cell."""
        while True:
            try:
                await self.poll()
                self._watch.worked("watch Redis")
            except RedisTrouble as error:
                self._watch.failed("watch Redis", error)
            await asyncio.sleep(POLL_S)

    def now_ms(self) -> int:
        """Redis' clock."""
        return int(time.time() * 1000) + self._clock_ahead_ms

    async def poll(self) -> None:
        """One look at Redis' memory and clock, and at the settings of the cell.

        What has ended yields before anything new is refused.
        """
        self._looked = time.monotonic()
        used, most, _ = await read_memory(self._client)
        if most and used > YIELD_SHARE * most:
            used = await self._make_room(used, most)
        full = most and used > FULL_SHARE * most
        self._full = f"Redis uses {used >> 20} of {most >> 20} MiB" if full else ""
        seconds, micros = cast(tuple[int, int], await cast(Any, self._client.time()))
        self._clock_ahead_ms = seconds * 1000 + micros // 1000 - int(time.time() * 1000)
        cell = await read_cell_settings_async(self._client, Keys(self._settings.cell))
        if cell is not None and cell != self._cell:
            cell.tell(CellSettings.of(self._settings))
            self._cell, self._flights.followers.retention_s = cell, cell.retention_s

    async def _make_room(self, used: int, most: int) -> int:
        """Forget what has ended, oldest first, until half the memory is free; the bytes in use then."""
        before, forgotten, left = used, 0, 0
        for _ in range(BITES):
            gone, left = await self._scripts.run(calls.forget(BITE))
            forgotten += gone
            used = (await read_memory(self._client)).used
            if gone < BITE or used <= YIELD_SHARE * most:
                break
        if forgotten:
            self._metrics.forgotten.inc(forgotten)
            logs.get().warning(
                "ENDED_REQUESTS_FORGOTTEN", requests=forgotten, left=left, used=before, used_now=used, maxmemory=most
            )
        return used

    async def _look_again(self) -> None:
        """Before a refusal for want of memory: what has ended by now may go."""
        if time.monotonic() - self._looked > LOOKED_S:
            try:
                await self.poll()
            except RedisTrouble as error:
                self._watch.met(error)

    async def submit(self, orders: Sequence[Order], tenant: Tenant, *, together: bool = False) -> Readers:
        """Accept all orders of a tenant, or find those that a key names or that ran as the same session step before;
        with a reader attached to each.

        `together`: rows of one step. The first that is new passes the limits for all, and its session's
        compare-and-set keeps other steps out, so that nothing but Redis refuses those behind it.
        Raises Overloaded, BadRequest, ServiceUnavailable, KeyReused, or Conflict when the session is at another step;
        then nothing new of it is queued any more.
        """
        if self._full:
            await self._look_again()
        full = self._full or self._results.full
        if full and not await self._flights.recorded([order.request for order in orders]):
            raise Overloaded(
                f"the queue's memory is nearly used up: {full}",
                limit="redis_memory",
                retry_after_s=retry_after_s(MEMORY_RETRY_MS),
            )
        flights: list[Flight] = []
        fresh: list[Flight] = []
        need = max(map(need_pages, orders)) if together else 0
        for index, order in enumerate(orders):
            flight = self._prepare(scoped(order, tenant), tenant, need or need_pages(order))
            try:
                if order.fingerprint:
                    self._flights.seek(order.request)
                else:
                    self._flights.start(flight)
                if together and fresh:
                    answer = await self._accept(flight, NO_LIMITS, NO_LIMIT)
                else:
                    company = orders[index + 1 :] if together else ()
                    results = await self._results.limits(tenant) if order.result_bytes else (0, 0)
                    limits = limits_for(order, tenant, self._settings, company=company, results=results)
                    answer = await self._accept(flight, limits, self._settings.max_in_flight)
                self._check(answer, order, tenant)
                if answer.status == "OK":
                    flight.created = int(answer.detail) // 1000
                known = answer.status == "EXISTS" and bool(order.fingerprint)  # else our own retry: the id is random
                if answer.status == "REPEAT":
                    self._flights.drop(flight)
                    flight, known = await self._flights.resume(answer.detail, tenant.name), True
                elif known:
                    flight = await self._flights.resume(order.request, tenant.name)
                elif order.fingerprint:
                    flight = self._flights.join(flight)
            except BaseException as error:
                for started in (flight, *fresh):
                    self._flights.drop(started)
                # Those that a key led to are left as by a reader: this gateway no longer counts as one.
                Readers(self._flights, [known for known in flights if known not in fresh]).close()
                for accepted in fresh:
                    self._flights.followers.refused(accepted.request)
                if order.fingerprint:  # its ACCEPT makes us a follower; the request is its key's, perhaps another's
                    self._flights.followers.left(order.request)
                elif isinstance(error, RedisUnavailable | asyncio.CancelledError):  # its ACCEPT may have run
                    self._flights.followers.refused(order.request)
                await asyncio.shield(self._settle())
                if isinstance(error, NotFound):
                    raise ServiceUnavailable("the request was forgotten at this very moment; try again") from error
                raise
            flights.append(flight)
            if not known:
                fresh.append(flight)
                self._announce(order, flight)
        return Readers(self._flights, flights, replayed=not fresh)

    def _keep_s(self, order: Order) -> int:
        """Who asks with a key or in the background comes for the answer later: it is forgotten last."""
        if order.fingerprint:
            return self._settings.keyed_retention_s
        return self._settings.retention_s if order.body.background else 0

    def _prepare(self, order: Order, tenant: Tenant, need: int) -> Flight:
        timeout_s = self._settings.request_timeout_s if order.timeout_s is None else order.timeout_s
        deadline_ms = 0 if timeout_s is None else int((time.time() + timeout_s) * 1000)
        body = replace(order.body, gateway=self._gateway)
        accept = partial(
            calls.accept,
            order.request,
            body,
            model=self._model,
            need_pages=need,
            deadline_ms=deadline_ms and deadline_ms + self._clock_ahead_ms,
            fingerprint=order.fingerprint,
            keep_s=self._keep_s(order),
            session=order.session,
            tenant=tenant.name,
            weight=tenant.weight,
            priority=priority_of(order, tenant),
            reader=self._gateway if order.fingerprint else "",
            result_bytes=order.result_bytes,
        )
        return Flight(
            request=order.request,
            body=body,
            params=order.params,
            created=int(time.time()),
            accept=accept,
            tenant=tenant.name,
            deadline_ms=deadline_ms,
        )

    async def _accept(self, flight: Flight, limits: Limits, max_in_flight: int) -> Accepted:
        call = flight.accept(max_in_flight=max_in_flight, limits=limits)
        give_up, attempt = time.monotonic() + RETRY_FOR_S, 0
        while True:
            try:
                return await self._scripts.run(call)
            except RedisFull as error:
                self._watch.met(error)
                retry = retry_after_s(MEMORY_RETRY_MS)
                raise Overloaded("the queue's memory is used up", limit="redis_memory", retry_after_s=retry) from error
            except RedisTrouble as error:
                self._metrics.redis_errors.inc()
                if isinstance(error, RedisRefused) or time.monotonic() > give_up:
                    raise
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1

    def _check(self, answer: Accepted, order: Order, tenant: Tenant) -> None:
        if error := limit_error(answer, tenant):
            raise error
        match answer.status:
            case "OK" | "EXISTS" | "REPEAT":
                return
            case "OTHER":
                raise KeyReused(f"this {HEADER} came with another body before: a new request needs a new key")
            case "TOO_LARGE":
                raise BadRequest(
                    f"prompt and max_tokens together need {need_pages(order)} KV pages of {PAGE_TOKENS} tokens; "
                    f"the largest pool has {answer.detail}",
                    param="input_ids" if order.body.logits != "none" else "max_tokens",
                )
            case "STEP":
                raise wrong_step(order.body.session, order.body.step, int(answer.detail))
            case other:
                raise AssertionError(f"{other} is no refusal")

    async def _settle(self) -> None:
        try:
            await self._flights.settle()
        except RedisTrouble as error:  # once Redis answers
            self._watch.met(error)

    def _announce(self, order: Order, flight: Flight) -> None:
        self._metrics.prompt_tokens.inc(order.body.prompt.size - order.body.prior)
        log = logs.get().bind(request_id=order.request, traceparent=order.body.traceparent or None)
        if order.body.session:
            log = log.bind(session_id=order.body.session, step=order.body.step)
        content = {"prompt_token_ids": order.body.prompt.tolist()} if self._settings.log_prompts else {}
        log.info(
            "PIPELINE_EXECUTION_START",
            total_blocks=self._blocks,
            prompt_tokens=int(order.body.prompt.size),
            max_tokens=order.params.max_tokens,
            logits=order.body.logits,
            background=order.body.background,
            deadline_ms=flight.deadline_ms or None,
            **content,
        )


def wrong_step(session: str, step: int, expected: int) -> Conflict:
    """The 409 of a session step that is neither the next one nor a repeat of the last one."""
    what = f"session {session!r} expects step {expected}, not {step}"
    if step == expected - 1:
        what += ", which came with another body before"
    return Conflict(what, param="step")
