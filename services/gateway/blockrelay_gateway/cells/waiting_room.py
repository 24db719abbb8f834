"""Keeps refused requests until there is room for them, for clients that sent `Prefer: wait=SECONDS` (RFC 7240).

A kept request is not in the queue, and nothing of it outlives this process. It is tried again until it is accepted,
once, or its time is over; then its client gets the last refusal.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import LimitExceeded
from blockrelay.observability import logs
from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay_gateway.admission.admission_request import FIRST, AdmissionRequest, Turn
from blockrelay_gateway.admission.limits import priority_of
from blockrelay_gateway.draining.drain import Drain
from blockrelay_gateway.policy import KEPT_BYTES_A_PLACE, KEPT_PLACES, KEPT_TRY_S

T = TypeVar("T")
#: Limits whose room comes back while a request waits. That of a deadline does not, and those of connections, bodies and
#: results are of memory that a kept request takes itself.
PASSING = ("tokens_per_minute", "concurrency", "in_flight", "kv_pages", "wait", "redis_memory")


class _TimeIsOver(Exception):
    """The client does not want to wait any longer."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client wants to wait for room."""

    wait_s: float
    tenant: Callable[[], Tenant]
    """Returns its tenant with the limits of now; raises Unauthorized once its key was removed."""
    kept: Callable[[LimitExceeded], None]
    """Called with the refusal for which its requests are kept."""


@dataclass(eq=False, slots=True)
class _Kept:
    """The kept requests of one client body."""

    requests: Sequence[AdmissionRequest]
    priority: int
    places: int
    patience: Patience
    since: float
    """When it came, by the event loop's clock."""

    @property
    def until(self) -> float:
        """When the client's patience is over, by the same clock."""
        return self.since + self.patience.wait_s


@dataclass(slots=True)
class _Line:
    """What is kept for one tenant, in the order in which it came. The first one alone is tried."""

    kept: list[_Kept] = field(default_factory=list[_Kept])
    first: asyncio.Lock = field(default_factory=asyncio.Lock)


class WaitingRoom:
    """KEPT_PLACES places for refused requests of all tenants.

    A tenant may have as many places as are free: one tenant leaves half for others, and any number of them leave
    something for the next. Without keys everybody is one tenant, which may have all. The first ones of all tenants are
    tried in turn, one at a time, and nothing is tried for KEPT_TRY_S seconds after a refusal, so waiting costs little.
    """

    def __init__(self, drain: Drain, metrics: GatewayMetrics) -> None:
        self._drain, self._metrics = drain, metrics
        self._lines: dict[str, _Line] = {}
        self._trying = asyncio.Lock()
        self._places: Counter[str] = Counter()

    def has_room(self, tenant: str, places: int = 1) -> bool:
        """True if `tenant` may have `places` more; never while the gateway ends."""
        free = KEPT_PLACES - self._places.total()
        return places <= (free - self._places[tenant] if tenant else free) and not self._drain.has_begun

    def turn(self, requests: Sequence[AdmissionRequest], tenant: Tenant) -> Turn:
        """The turn of new requests of `tenant` behind those that are kept. Raises BadRequest for a wrong priority."""
        line = self._lines.get(tenant.name)
        return _turn(line.kept, priority_of(requests[0], tenant)) if line else FIRST

    async def keep(
        self,
        requests: Sequence[AdmissionRequest],
        tenant: Tenant,
        attempt: Callable[[Tenant, Turn], Awaitable[T]],
        refusal: LimitExceeded,
        patience: Patience,
    ) -> T:
        """Calls `attempt` until it raises no limit of PASSING, and returns its result.

        `refusal` is that of the attempt before. It is raised at once if there is no place, and the last one is raised
        when the client's patience is over and when the gateway ends. Other errors of `attempt`, and of
        `patience.tenant`, are raised at once.
        """
        places = sum(1 + request.body.prompt.nbytes // KEPT_BYTES_A_PLACE for request in requests)
        if refusal.limit not in PASSING or not patience.wait_s or not self.has_room(tenant.name, places):
            raise refusal
        kept = _Kept(requests, priority_of(requests[0], tenant), places, patience, _now())
        line = self._lines.setdefault(tenant.name, _Line())
        line.kept.append(kept)
        self._count(tenant.name, places)
        logs.get().info("REQUEST_KEPT", request_id=requests[0].request_id, limit=refusal.limit, wait_s=patience.wait_s)
        patience.kept(refusal)
        outcome = "left"
        try:
            found = await self._tried(line, kept, attempt, refusal)
            outcome = "accepted"
            return found
        except LimitExceeded:
            outcome = "refused"
            raise
        finally:
            line.kept.remove(kept)
            if not line.kept:
                del self._lines[tenant.name]
            self._count(tenant.name, -places)
            self._metrics.kept_seconds.labels(outcome).observe(_now() - kept.since)

    async def _tried(
        self, line: _Line, kept: _Kept, attempt: Callable[[Tenant, Turn], Awaitable[T]], refusal: LimitExceeded
    ) -> T:
        """Waits to be the first of the line, then calls `attempt` when it is the tenant's turn."""
        try:
            async with _held(line.first, kept.until):
                while True:
                    async with _held(self._trying, kept.until):
                        if self._drain.has_begun:
                            raise refusal
                        try:
                            return await attempt(kept.patience.tenant(), Turn(waited_s=_now() - kept.since))
                        except LimitExceeded as error:
                            if error.limit not in PASSING:
                                raise
                            refusal = error
                        await asyncio.sleep(KEPT_TRY_S)
        except _TimeIsOver:
            raise refusal from None

    def _count(self, tenant: str, places: int) -> None:
        self._places[tenant] += places
        if not self._places[tenant]:
            del self._places[tenant]
        self._metrics.tell_kept(sum(len(one.requests) for line in self._lines.values() for one in line.kept))


def _turn(kept: Sequence[_Kept], priority: int) -> Turn:
    """The turn of a request of this priority behind those that are kept."""
    ahead = [request for one in kept if one.priority <= priority for request in one.requests]
    return Turn(
        requests=len(ahead),
        rows=sum(int(request.body.prompt.size) for request in ahead),
        tokens=sum(request.tokens for request in ahead),
    )


def _now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def _held(lock: asyncio.Lock, until: float) -> AsyncIterator[None]:
    """Holds `lock`, which goes to those who wait in their order. Raises _TimeIsOver if it is not free by `until`."""
    if _now() >= until:  # a free lock is taken without a look at the clock
        raise _TimeIsOver
    try:
        async with asyncio.timeout_at(until):
            await lock.acquire()
    except TimeoutError:
        raise _TimeIsOver from None
    try:
        yield
    finally:
        lock.release()
