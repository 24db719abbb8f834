"""Accepts requests with the script ACCEPT, which checks their limits.

A refused request leaves nothing behind: the script checks limits before its first write, and of several choices of one
HTTP request either all are accepted or none. The states of one request on its way are a table (`submission_states`).
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import (
    LimitExceeded,
    NotFound,
    RedisFull,
    RedisRefused,
    RedisTrouble,
    RedisUnavailable,
    ServiceUnavailable,
)
from blockrelay.observability import logs
from blockrelay.protocol.transitions.calls import NO_LIMITS, Accepted, Binding, Limits
from blockrelay.redis.client import backoff_s
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.cell_watch import CellWatch
from blockrelay_gateway.admission.limits import counted_again, limits_for, priority_of
from blockrelay_gateway.admission.namespaces import scoped
from blockrelay_gateway.admission.open_ended import PoolShares, bounded
from blockrelay_gateway.admission.refusals import memory_used_up, pages_of, refusal
from blockrelay_gateway.admission.submission_states import Effect, Event, State, answered, step
from blockrelay_gateway.admission.tensor_results import TensorResults
from blockrelay_gateway.policy import ACCEPT_RETRY_S
from blockrelay_gateway.streaming.active_requests.acceptance import NO_LIMIT_OF_REQUESTS, Acceptance
from blockrelay_gateway.streaming.active_requests.active_request import ActiveRequest
from blockrelay_gateway.streaming.active_requests.gateway_lease import GatewayLease
from blockrelay_gateway.streaming.active_requests.request_registry import RequestRegistry
from blockrelay_gateway.streaming.active_requests.resumption import Resumption
from blockrelay_gateway.streaming.cell_links import CellLinks
from blockrelay_gateway.streaming.readers import Readers
from blockrelay_gateway.streaming.records import Records


@dataclass(slots=True)
class _Submitted:
    """One request on its way through `submission_states.TABLE`; `answer` is ACCEPT's."""

    request: AdmissionRequest
    tenant: Tenant
    active: ActiveRequest
    state: State
    answer: Accepted | None = None


class Admission:
    """Accepts new requests in one cell; nothing else calls ACCEPT for them."""

    def __init__(
        self,
        links: CellLinks,
        registry: RequestRegistry,
        lease: GatewayLease,
        records: Records,
        resumption: Resumption,
        cell: CellWatch,
        results: TensorResults,
        *,
        blocks: int,
        settings: GatewaySettings,
    ) -> None:
        """`blocks` is the model's number of blocks."""
        self._links, self._watch, self._pools = links, links.watch, PoolShares(links)
        self._registry, self._lease, self._records, self._resumption = registry, lease, records, resumption
        self._cell, self._results, self._blocks, self._settings = cell, results, blocks, settings

    async def submit(
        self,
        requests: Sequence[AdmissionRequest],
        tenant: Tenant,
        *,
        together: bool = False,
        binding: Binding | None = None,
        waited_s: float | None = None,
    ) -> Readers:
        """Accepts all requests of one body (at least one), or none, and returns a reader of them all.

        A request that exists already is found instead: by its Idempotency-Key, or as the same step of its session. The
        first new request passes the limits for all, so that nothing is begun, or charged, if they do not all fit.
        Other clients may take the room meanwhile, so limits that acceptance itself uses up are checked again for the
        requests behind it. `together`: the requests are rows of one step. The compare-and-set of its session keeps
        other steps out, so only Redis can refuse the rows behind the first. `binding`: the reason why the requests go
        to this cell, if they may not go to another. `waited_s`: seconds for which they were kept since they were
        refused; their timeouts began then. None: this is the first try.

        The caller closes the reader. Raises LimitExceeded, BadRequest, ServiceUnavailable, RedisTrouble, KeyReused, or
        Conflict if the session is at another step; then no new request stays in the queue. Raises WireError if the
        record of a request that exists already cannot be decoded.
        """
        await self._check_room(requests)
        for request in requests:
            if request.given:
                await self._results.give(request.request_id, request.given)
        if any(request.open_ended for request in requests):
            share = await self._pools.pages()
            requests = [bounded(request, tenant, share) for request in requests]
        pages = max(pages_of(request) for request in requests) if together else 0
        submitted: list[_Submitted] = []
        try:
            for index, request in enumerate(requests):
                one = self._prepare(request, tenant, pages or pages_of(request), binding, waited_s or 0.0)
                first = not any(other.state is State.ACCEPTED for other in submitted)
                submitted.append(one)
                await self._apply(one, Event.SUBMIT)
                if together and not first:
                    answer = await self._accept(one, NO_LIMITS, NO_LIMIT_OF_REQUESTS)
                else:
                    limits = await self._limits(request, tenant, requests[index + 1 :], each=not together)
                    limits = limits if first else counted_again(limits)
                    answer = await self._accept(one, limits, self._settings.max_in_flight)
                if error := refusal(answer, request, tenant, others=len(requests) - index - 1):
                    if isinstance(error, LimitExceeded) and error.scope == "client" and waited_s is None:
                        self._links.tenants.limited(tenant.name, error.limit)
                    raise error
                one.answer = answer
                await self._apply(one, answered(answer.status))
        except BaseException as error:
            await self._withdraw(submitted, error)
            for request in requests:
                if request.given:
                    await self._results.take_back(request.request_id)
            if isinstance(error, NotFound):
                raise ServiceUnavailable("the request was forgotten at this very moment; try again") from error
            raise
        replayed = all(one.state is State.FOUND for one in submitted)
        return Readers(self._registry, [one.active for one in submitted], replayed=replayed)

    async def _check_room(self, requests: Sequence[AdmissionRequest]) -> None:
        """Raises LimitExceeded if Redis has no room for new requests, and one of these is new.

        Raises ServiceUnavailable while the cell's protocol is not that of this gateway, and RedisTrouble.
        """
        if self._cell.protocol_gap:
            raise ServiceUnavailable(self._cell.protocol_gap)
        if self._cell.full:
            await self._cell.look_again()
        full = self._cell.full or self._results.full
        if full and not await self._records.exist([request.request_id for request in requests]):
            raise memory_used_up(f"the queue's memory is nearly used up: {full}")

    async def _limits(
        self, request: AdmissionRequest, tenant: Tenant, others: Sequence[AdmissionRequest], *, each: bool
    ) -> Limits:
        results = await self._results.limits(tenant) if request.result_bytes else (0, 0)
        return limits_for(request, tenant, self._settings, others=others, each=each, results=results)

    async def _apply(self, one: _Submitted, event: Event) -> None:
        """Performs the effects of the table, then sets the state. An effect that fails leaves the state as it was."""
        effects, state = step(one.state, event)
        for effect in effects:
            await self._perform(effect, one)
        one.state = state

    async def _perform(self, effect: Effect, one: _Submitted) -> None:
        request_id, answer = one.request.request_id, one.answer
        match effect:
            case Effect.FOLLOW:
                self._registry.start(one.active)
            case Effect.SEEK:
                self._registry.seek(request_id)
            case Effect.DATE:
                assert answer is not None
                one.active.created = int(answer.detail) // 1000
            case Effect.JOIN:
                one.active = self._registry.join(one.active)
            case Effect.ANNOUNCE:
                self._announce(one.request, one.active)
            case Effect.RESUME:
                assert answer is not None
                name = answer.detail if answer.status == "REPEAT" else request_id
                one.active = await self._resumption.resume(name, one.tenant.name)
            case Effect.DROP:
                self._registry.drop(one.active)
            case Effect.RELEASE:
                Readers(self._registry, [one.active]).close()
            case Effect.TAKE_BACK:
                self._lease.refused(request_id)
            case Effect.LEAVE:
                self._lease.left(request_id)

    async def _withdraw(self, submitted: Sequence[_Submitted], error: BaseException) -> None:
        """Takes back all requests after the last one failed with `error`, here and, once it answers, in Redis."""
        lost = isinstance(error, RedisUnavailable | asyncio.CancelledError)  # the last ACCEPT may have run
        for one in reversed(submitted):
            if one.state in (State.FOLLOWED, State.SOUGHT):
                await self._apply(one, Event.LOST if lost else Event.REFUSED)
            elif one.state in (State.ACCEPTED, State.FOUND):
                await self._apply(one, Event.WITHDRAW)
        await asyncio.shield(self._settle())

    async def _settle(self) -> None:
        try:
            await self._lease.settle(self._registry)
        except RedisTrouble as error:  # background work tries again once Redis answers
            self._watch.count_error(error)

    def _prepare(
        self, request: AdmissionRequest, tenant: Tenant, pages: int, binding: Binding | None, waited_s: float
    ) -> _Submitted:
        """The request in its first state, with the arguments of ACCEPT. Its timeout began `waited_s` seconds ago.

        Raises BadRequest for a priority that the tenant's key may not have.
        """
        timeout_s = self._settings.request_timeout_s if request.timeout_s is None else request.timeout_s
        deadline_ms = 0 if timeout_s is None else self._cell.now_ms() + int((timeout_s - waited_s) * 1000)
        own = scoped(request, tenant)
        acceptance = Acceptance(
            request_id=own.request_id,
            body=replace(own.body, gateway=self._links.gateway),
            model=self._links.model,
            pages_needed=pages,
            deadline_ms=deadline_ms,
            fingerprint=own.fingerprint,
            retention_s=self._retention_s(own),
            session=own.session,
            tenant=tenant.name,
            weight=tenant.weight,
            priority=priority_of(own, tenant),
            reader=self._links.gateway if own.fingerprint else "",
            result_bytes=own.result_bytes,
            expected_tokens=own.expected_tokens,
            binding=binding,
        )
        active = ActiveRequest(acceptance, own.params, created=int(time.time()), cell=self._cell.name)
        return _Submitted(request, tenant, active, State.NEW_KEYED if request.fingerprint else State.NEW)

    def _retention_s(self, request: AdmissionRequest) -> int:
        """Seconds for which the ended request is kept; 0: as long as the cell says, but forgotten first for room.

        Clients of keyed and background requests come for the answer later.
        """
        if request.fingerprint:
            return self._settings.keyed_retention_s
        return self._cell.retention_s if request.body.background else 0

    async def _accept(self, one: _Submitted, limits: Limits, max_in_flight: int) -> Accepted:
        """Runs ACCEPT and returns its answer, also that of a refusal.

        Raises LimitExceeded if Redis is full, RedisRefused at once, and RedisTrouble after ACCEPT_RETRY_S seconds.
        """
        replicas = self._settings.accept_replicas
        call = one.active.acceptance.call(max_in_flight=max_in_flight, limits=limits, confirm=replicas > 0)
        give_up, attempt = time.monotonic() + ACCEPT_RETRY_S, 0
        while True:
            try:
                return await self._links.scripts.run(call, replicas=replicas)
            except RedisFull as error:
                self._watch.count_error(error)
                raise memory_used_up("the queue's memory is used up") from error
            except RedisTrouble as error:
                self._links.metrics.redis_errors.inc()
                if isinstance(error, RedisRefused) or time.monotonic() > give_up:
                    raise
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1

    def _announce(self, request: AdmissionRequest, active: ActiveRequest) -> None:
        """Counts and logs a request that was accepted."""
        body = request.body
        self._cell.accepted()
        self._links.metrics.prompt_tokens.inc(body.prompt.size - body.prior)
        self._links.tenants.accepted(active.tenant, body.prompt.size - body.prior)
        log = logs.get().bind(request_id=request.request_id, traceparent=body.traceparent or None)
        if body.session:
            log = log.bind(session_id=body.session, step=body.step)
        content = {"prompt_token_ids": body.prompt.tolist()} if self._settings.log_prompts else {}
        log.info(
            "PIPELINE_EXECUTION_START",
            total_blocks=self._blocks,
            prompt_tokens=int(body.prompt.size),
            max_tokens=request.params.max_tokens,
            logits=body.logits,
            background=body.background,
            deadline_ms=active.acceptance.deadline_ms or None,
            **content,
        )
