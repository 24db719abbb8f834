"""Keeps refused requests until there is room for them, for clients that sent `Prefer: wait=SECONDS` (RFC 7240).

A kept request is not in the queue, and nothing of it outlives this process. It is tried again until it is accepted,
once, or its client's patience is over; then the client gets the last refusal.
"""

import asyncio
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from blockrelay.auth.api_keys import Tenant
from blockrelay.errors import BlockrelayError, LimitExceeded
from blockrelay.observability import logs
from blockrelay.observability.metrics.gateway import GatewayMetrics
from blockrelay_gateway.admission.admission_request import AdmissionRequest
from blockrelay_gateway.admission.limits import priority_of
from blockrelay_gateway.draining.drain import Drain
from blockrelay_gateway.policy import KEPT_BYTES_A_PLACE, KEPT_LEAST_S, KEPT_OWN_TRY_S, KEPT_PLACES, KEPT_TRY_S

T = TypeVar("T")
#: Limits whose room comes back while a request waits. That of a deadline does not, and those of connections, bodies and
#: results are of memory that a kept request takes itself.
PASSING = ("tokens_per_minute", "concurrency", "in_flight", "kv_pages", "wait", "redis_memory")
#: Those that depend on what the request needs: another one may fit.
BY_SIZE = ("tokens_per_minute", "kv_pages", "wait")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client wants to wait for room."""

    wait_s: float
    tenant: Callable[[], Tenant]
    """Returns its tenant with the limits of now; raises Unauthorized once its key was removed."""


@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """A way to have a request accepted."""

    run: Callable[[Tenant, float], Coroutine[Any, Any, T]]
    """Tries it once, for a tenant; gets the seconds for which the request was kept."""
    release: Callable[[T], None]
    """Gives up what `run` has returned."""
    cell: str
    """Name of the only cell that may have the request; "": any cell may."""


@dataclass(order=True, slots=True)
class _Kept:
    """A kept request, in the order in which those of one line are accepted."""

    priority: int
    number: int
    since: float = field(compare=False)
    """When it came, by the event loop's clock."""
    patience: Patience = field(compare=False)
    is_first: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    passed: bool = field(default=False, compare=False)
    """True after a refusal for its size, until those behind it have been tried."""

    @property
    def until(self) -> float:
        """When the client's patience is over, by the same clock."""
        return self.since + self.patience.wait_s


@dataclass(slots=True)
class _Line:
    """The kept requests of one tenant for one cell. Only the first one is tried."""

    kept: list[_Kept] = field(default_factory=list[_Kept])
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request of the tenant ends."""

    def enter(self, one: _Kept) -> None:
        insort(self.kept, one)
        self._tell()

    def leave(self, one: _Kept) -> None:
        self.kept.remove(one)
        one.is_first.clear()
        self._tell()

    def pass_over(self, one: _Kept) -> None:
        one.passed = True
        self._tell()

    def _tell(self) -> None:
        if all(one.passed for one in self.kept):
            for one in self.kept:
                one.passed = False
        waiting = [one for one in self.kept if not one.passed]
        for one in self.kept:
            one.is_first.set() if one is waiting[0] else one.is_first.clear()


@dataclass(slots=True)
class _Turns:
    """Lets the lines of one cell try one after the other."""

    trying: asyncio.Lock = field(default_factory=asyncio.Lock)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when any request ends."""


class WaitingRoom:
    """KEPT_PLACES places for refused requests of all tenants.

    A tenant may have as many places as are free: one tenant leaves half for others, and any number of them leave
    something for the next. Without keys everybody is one tenant, which may have all. The first of each line are tried
    in turn: for room in their cell when a request ends and each KEPT_TRY_S seconds, one at a time; for room below their
    tenant's own limits when a request of the tenant ends and each KEPT_OWN_TRY_S seconds.
    """

    def __init__(self, drain: Drain, metrics: GatewayMetrics) -> None:
        self._drain, self._metrics, self._count = drain, metrics, 0
        self._lines: dict[tuple[str, str], _Line] = {}
        self._turns: defaultdict[str, _Turns] = defaultdict(_Turns)
        self._places: Counter[str] = Counter()

    def ended(self, tenant: str) -> None:
        """Tells that a request of `tenant` has ended, in any cell: there may be room."""
        for turns in self._turns.values():
            turns.news.set()
        for (name, _), line in self._lines.items():
            if name == tenant:
                line.news.set()

    def gateway_ends(self) -> None:
        """Tells that the gateway ends: nothing is kept any longer."""
        for tenant in {name for name, _ in self._lines}:
            self.ended(tenant)

    async def keep(
        self,
        request: AdmissionRequest,
        tenant: Tenant,
        attempt: Attempt[T],
        refusal: LimitExceeded,
        patience: Patience,
    ) -> T:
        """Tries until there is room, and returns what `attempt` does.

        `refusal` is that of the first attempt. It is raised at once if its limit is none of PASSING or if there is no
        place, and the last one is raised when the patience is over and when the gateway ends. All other errors of
        attempts, and those of `patience.tenant`, are raised at once.
        """
        places = 1 + request.body.prompt.nbytes // KEPT_BYTES_A_PLACE
        if refusal.limit not in PASSING or not self._has_room(tenant.name, places):
            raise refusal
        self._count += 1
        kept = _Kept(priority_of(request, tenant), self._count, _now(), patience)
        line = self._lines.setdefault((tenant.name, attempt.cell), _Line())
        line.enter(kept)
        self._take(tenant.name, places)
        outcome = "refused"
        try:
            logs.get().info("REQUEST_KEPT", request_id=request.request_id, limit=refusal.limit, wait_s=patience.wait_s)
            found = await self._tried(line, kept, attempt, refusal)
            outcome = "accepted"
            return found
        except asyncio.CancelledError:
            outcome = "left"
            raise
        finally:
            line.leave(kept)
            if not line.kept:
                del self._lines[tenant.name, attempt.cell]
            self._take(tenant.name, -places)
            self._metrics.kept_seconds.labels(outcome).observe(_now() - kept.since)

    async def _tried(self, line: _Line, kept: _Kept, attempt: Attempt[T], refusal: LimitExceeded) -> T:
        turns = self._turns[attempt.cell]

        async def once() -> T:
            if self._drain.has_begun:
                raise refusal
            tenant = kept.patience.tenant()
            return await _to_its_end(attempt.run(tenant, _now() - kept.since), attempt.release)

        while await _comes_first(kept, turns.trying):
            line.news.clear()
            turns.news.clear()
            try:
                return await once()
            except LimitExceeded as error:
                if error.limit not in PASSING or self._drain.has_begun:
                    raise
                refusal = error
                if error.limit in BY_SIZE:
                    line.pass_over(kept)
                if error.scope == "cell":  # it would refuse the others as well
                    await _news(turns.news, KEPT_TRY_S)
            finally:
                turns.trying.release()
            if refusal.scope == "client":
                pause_s = max(KEPT_OWN_TRY_S, self._places.total() * KEPT_TRY_S / 2)
                await _news(line.news, min(pause_s, kept.until - _now()))
        try:
            return await once()  # wherever it stands: it may have been accepted elsewhere by its key
        except LimitExceeded as error:
            raise refusal if error.limit == "deadline" else error from None

    def _has_room(self, tenant: str, places: int) -> bool:
        free = KEPT_PLACES - self._places.total()
        return places <= (free - self._places[tenant] if tenant else free) and not self._drain.has_begun

    def _take(self, tenant: str, places: int) -> None:
        self._places[tenant] += places
        if not self._places[tenant]:
            del self._places[tenant]
        self._metrics.tell_kept(sum(len(line.kept) for line in self._lines.values()))


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _comes_first(kept: _Kept, trying: asyncio.Lock) -> bool:
    """Takes the lock once `kept` is the first of its line. False, without the lock, when its time is over before."""
    while _now() < kept.until:
        try:
            async with asyncio.timeout_at(kept.until):
                await kept.is_first.wait()
                await trying.acquire()
        except TimeoutError:
            return False
        if kept.is_first.is_set():
            return True
        trying.release()  # one with an earlier priority has come meanwhile
    return False


async def _news(news: asyncio.Event, most_s: float) -> None:
    """Waits until something has ended, `most_s` seconds at most, and KEPT_LEAST_S at least."""
    await asyncio.sleep(KEPT_LEAST_S)
    with suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            await news.wait()


async def _to_its_end(trying: Coroutine[Any, Any, T], release: Callable[[T], None]) -> T:
    """Returns the result of an attempt. If the client leaves first, it runs to its end, and its result is released.

    What Redis has accepted by then is cancelled as if the client had left a moment later.
    """
    task = asyncio.ensure_future(trying)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(BlockrelayError):
            release(await task)
        raise
