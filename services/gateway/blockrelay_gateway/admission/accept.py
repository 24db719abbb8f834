"""Accepts requests: ACCEPT with its limits, and nothing else that writes.

A refused request leaves nothing behind: limits are checked by the script before its first write, and of several prompts
of one HTTP request either all are accepted or none. How one request gets there is a table (`submission`).
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
from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay.observability.metrics.tenants import TenantMetrics
from blockrelay.protocol.constants import PAGE_TOKENS
from blockrelay.protocol.transitions.calls import NO_LIMITS, Accepted, Binding, Limits
from blockrelay.redis.client import AsyncScripts, backoff_s
from blockrelay.redis.errors import RedisWatch
from blockrelay.settings import GatewaySettings
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.cell_watch import CellWatch
from blockrelay_gateway.admission.limits import counted_again, limits_for, priority_of
from blockrelay_gateway.admission.namespaces import scoped
from blockrelay_gateway.admission.open_ended import PoolShares, bounded
from blockrelay_gateway.admission.refusals import memory_used_up, pages_of, refusal
from blockrelay_gateway.admission.submission import Effect, Event, State, answered, step
from blockrelay_gateway.admission.tensor_results import Results
from blockrelay_gateway.streaming.following.acceptance import NO_MOST, Acceptance
from blockrelay_gateway.streaming.following.followed_request import FollowedRequest
from blockrelay_gateway.streaming.following.followers import Followers
from blockrelay_gateway.streaming.following.registry import FollowedRequests
from blockrelay_gateway.streaming.following.resumption import Resumption
from blockrelay_gateway.streaming.readers import Readers
from blockrelay_gateway.streaming.records import Records

#: ACCEPT is idempotent by request id, so a lost connection is no reason to give up at once. Longer than most failovers:
#: whoever gets 503 comes back a second later at the earliest.
RETRY_FOR_S = 5.0


@dataclass(slots=True)
class _Submitted:
    """One request on its way through `submission.TABLE`.

    `followed` is what its readers read, once it is followed; `answer` is ACCEPT's.
    """

    request: AdmissionRequest
    tenant: Tenant
    followed: FollowedRequest
    state: State
    answer: Accepted | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """What admission needs of the requests that are followed."""

    followed: FollowedRequests
    followers: Followers
    records: Records
    resumption: Resumption


class Admission:
    """The only caller of ACCEPT for new requests."""

    def __init__(
        self,
        scripts: AsyncScripts,
        streaming: Streaming,
        cell: CellWatch,
        results: Results,
        pools: PoolShares,
        metrics: GatewayMetrics,
        tenants: TenantMetrics,
        watch: RedisWatch,
        *,
        gateway: str,
        model: str,
        blocks: int,
        settings: GatewaySettings,
    ) -> None:
        """`blocks`: of the model, for the log."""
        self._scripts, self._streaming, self._cell = scripts, streaming, cell
        self._results, self._pools = results, pools
        self._metrics, self._tenants, self._watch = metrics, tenants, watch
        self._gateway, self._model, self._blocks, self._settings = gateway, model, blocks, settings

    async def submit(
        self,
        requests: Sequence[AdmissionRequest],
        tenant: Tenant,
        *,
        together: bool = False,
        binding: Binding | None = None,
    ) -> Readers:
        """Accept all requests of a tenant, or find those that a key names or that ran as the same session step before;
        with a reader attached to each.

        The first that is new passes the limits for all, so that nothing is begun, or charged, of what does not fit.
        Others may take the room since then: of those behind it what only grows by being accepted is counted again.
        `together`: rows of one step. Its session's compare-and-set keeps other steps out, so that nothing but Redis
        refuses those behind the first.
        `binding`: why they go to this cell, if they may not go to another.
        Raises LimitExceeded, BadRequest, ServiceUnavailable, KeyReused, or Conflict when the session is at another
        step; then nothing new of it is queued any more.
        """
        await self._check_room(requests)
        for request in requests:
            if request.given:
                await self._results.give(request.request, request.given)
        if any(request.open_ended for request in requests):
            share = await self._pools.pages()
            requests = [bounded(request, tenant, share) for request in requests]
        pages = max(pages_of(request, PAGE_TOKENS) for request in requests) if together else 0
        submitted: list[_Submitted] = []
        try:
            for index, request in enumerate(requests):
                one = self._prepare(request, tenant, pages or pages_of(request, PAGE_TOKENS), binding)
                first = not any(other.state is State.ACCEPTED for other in submitted)
                submitted.append(one)
                await self._apply(one, Event.SUBMIT)
                if together and not first:
                    answer = await self._accept(one, NO_LIMITS, NO_MOST)
                else:
                    limits = await self._limits(request, tenant, requests[index + 1 :], each=not together)
                    limits = limits if first else counted_again(limits)
                    answer = await self._accept(one, limits, self._settings.max_in_flight)
                if error := refusal(
                    answer, request, tenant, page_tokens=PAGE_TOKENS, company=len(requests) - index - 1
                ):
                    if isinstance(error, LimitExceeded) and error.scope == "client":
                        self._tenants.limited(tenant.name, error.limit)
                    raise error
                one.answer = answer
                await self._apply(one, answered(answer.status))
        except BaseException as error:
            await self._withdraw(submitted, error)
            for request in requests:
                if request.given:
                    await self._results.take_back(request.request)
            if isinstance(error, NotFound):
                raise ServiceUnavailable("the request was forgotten at this very moment; try again") from error
            raise
        replayed = all(one.state is State.FOUND for one in submitted)
        return Readers(self._streaming.followed, [one.followed for one in submitted], replayed=replayed)

    async def _check_room(self, requests: Sequence[AdmissionRequest]) -> None:
        """Raise LimitExceeded when Redis has no room for what is not accepted yet, ServiceUnavailable while the cell
        does not speak our protocol."""
        if self._cell.protocol_gap:
            raise ServiceUnavailable(self._cell.protocol_gap)
        if self._cell.full:
            await self._cell.look_again()
        full = self._cell.full or self._results.full
        if full and not await self._streaming.records.exist([request.request for request in requests]):
            raise memory_used_up(f"the queue's memory is nearly used up: {full}")

    async def _limits(
        self, request: AdmissionRequest, tenant: Tenant, company: Sequence[AdmissionRequest], *, each: bool
    ) -> Limits:
        results = await self._results.limits(tenant) if request.result_bytes else (0, 0)
        return limits_for(request, tenant, self._settings, company=company, each=each, results=results)

    async def _apply(self, one: _Submitted, event: Event) -> None:
        """Do what the table says. An effect that fails leaves the state as it was."""
        effects, state = step(one.state, event)
        for effect in effects:
            await self._perform(effect, one)
        one.state = state

    async def _perform(self, effect: Effect, one: _Submitted) -> None:
        streaming, request, answer = self._streaming, one.request.request, one.answer
        match effect:
            case Effect.FOLLOW:
                streaming.followed.start(one.followed)
            case Effect.SEEK:
                streaming.followed.seek(request)
            case Effect.DATE:
                assert answer is not None
                one.followed.created = int(answer.detail) // 1000
            case Effect.JOIN:
                one.followed = streaming.followed.join(one.followed)
            case Effect.ANNOUNCE:
                self._announce(one.request, one.followed)
            case Effect.RESUME:
                assert answer is not None
                name = answer.detail if answer.status == "REPEAT" else request
                one.followed = await streaming.resumption.resume(name, one.tenant.name)
            case Effect.DROP:
                streaming.followed.drop(one.followed)
            case Effect.RELEASE:
                Readers(streaming.followed, [one.followed]).close()
            case Effect.TAKE_BACK:
                streaming.followers.refused(request)
            case Effect.LEAVE:
                streaming.followers.left(request)

    async def _withdraw(self, submitted: Sequence[_Submitted], error: BaseException) -> None:
        """One of them has failed, the last: nothing of any is left, here or, once it answers, in Redis."""
        lost = isinstance(error, RedisUnavailable | asyncio.CancelledError)  # the last ACCEPT may have run
        for one in reversed(submitted):
            if one.state in (State.FOLLOWED, State.SOUGHT):
                await self._apply(one, Event.LOST if lost else Event.REFUSED)
            elif one.state in (State.ACCEPTED, State.FOUND):
                await self._apply(one, Event.WITHDRAW)
        await asyncio.shield(self._settle())

    async def _settle(self) -> None:
        try:
            await self._streaming.followers.settle(self._streaming.followed)
        except RedisTrouble as error:  # once Redis answers
            self._watch.met(error)

    def _prepare(self, request: AdmissionRequest, tenant: Tenant, pages: int, binding: Binding | None) -> _Submitted:
        """Raises BadRequest for a priority that the key may not have."""
        timeout_s = self._settings.request_timeout_s if request.timeout_s is None else request.timeout_s
        deadline_ms = 0 if timeout_s is None else self._cell.now_ms() + int(timeout_s * 1000)
        own = scoped(request, tenant)
        acceptance = Acceptance(
            request=own.request,
            body=replace(own.body, gateway=self._gateway),
            model=self._model,
            pages_needed=pages,
            deadline_ms=deadline_ms,
            fingerprint=own.fingerprint,
            retention_s=self._retention_s(own),
            session=own.session,
            tenant=tenant.name,
            weight=tenant.weight,
            priority=priority_of(own, tenant),
            reader=self._gateway if own.fingerprint else "",
            result_bytes=own.result_bytes,
            expected_tokens=own.expected_tokens,
            binding=binding,
        )
        followed = FollowedRequest(acceptance, own.params, created=int(time.time()), cell=self._cell.name)
        return _Submitted(request, tenant, followed, State.NEW_KEYED if request.fingerprint else State.NEW)

    def _retention_s(self, request: AdmissionRequest) -> int:
        """A client with a key, or of a background request, comes for the answer later: it is forgotten last."""
        if request.fingerprint:
            return self._settings.keyed_retention_s
        return self._cell.retention_s if request.body.background else 0

    async def _accept(self, one: _Submitted, limits: Limits, max_in_flight: int) -> Accepted:
        replicas = self._settings.accept_replicas
        call = one.followed.acceptance.call(max_in_flight=max_in_flight, limits=limits, confirm=replicas > 0)
        give_up, attempt = time.monotonic() + RETRY_FOR_S, 0
        while True:
            try:
                return await self._scripts.run(call, replicas=replicas)
            except RedisFull as error:
                self._watch.met(error)
                raise memory_used_up("the queue's memory is used up") from error
            except RedisTrouble as error:
                self._metrics.redis_errors.inc()
                if isinstance(error, RedisRefused) or time.monotonic() > give_up:
                    raise
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1

    def _announce(self, request: AdmissionRequest, followed: FollowedRequest) -> None:
        body = request.body
        self._cell.accepted()
        self._metrics.prompt_tokens.inc(body.prompt.size - body.prior)
        self._tenants.accepted(followed.tenant, body.prompt.size - body.prior)
        log = logs.get().bind(request_id=request.request, traceparent=body.traceparent or None)
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
            deadline_ms=followed.acceptance.deadline_ms or None,
            **content,
        )
