"""Who could run a request: routes of live workers, and the numerics ids that they serve (`serving.lua`)."""

from collections.abc import Sequence

from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Redis


def served(b: Bounds, redis: Redis, numerics: int, pages_needed: int, beating: Sequence[int]) -> bool:
    """Whether every stage has a live worker of the numerics id whose pool, even empty, would hold the request."""
    there = [
        worker
        for worker, w in redis.workers
        if w.inbox is not None
        and worker in beating
        and b.numerics(worker) == numerics
        and (w.pages >= pages_needed or not b.rules.small_pools_serve_nobody)
    ]
    routes = [{b.stage(worker) for worker in there if b.may_share(worker, first)} for first in there]
    return any(0 in staffed and (len(staffed) == b.stages or not b.rules.routes_are_whole) for staffed in routes)


def may_follow(b: Bounds, redis: Redis, me: int, beating: Sequence[int], pure: bool) -> frozenset[int]:
    """Numerics ids of which workers may share a route with me: those that vary, unless it has to be `pure`, and one
    other, mine or the first with which every stage has somebody."""
    if pure and b.rules.pure_routes and b.numerics(me) in b.varying:
        return frozenset()
    varying = frozenset[int]() if pure and b.rules.pure_routes else b.varying
    if b.numerics(me) not in b.varying:
        return varying | {b.numerics(me)}
    for partner in sorted(set(b.ids) - b.varying):
        there = {
            b.stage(worker)
            for worker, w in redis.workers
            if w.inbox is not None
            and worker in beating
            and b.numerics(worker) in varying | {partner}
            and b.may_share(worker, me)
        }
        if len(there) == b.stages:
            return varying | {partner}
    return varying


def candidates(
    b: Bounds, redis: Redis, me: int, stage: int, beating: Sequence[int], pure: bool, keeps: bool = True
) -> list[int]:  # fmt: skip
    """Live workers of a stage that may stand in a route with me; those that retire only with `keeps`."""
    if stage == 0:
        return [me]
    allowed = may_follow(b, redis, me, beating, pure)
    return [
        worker
        for worker, w in redis.workers
        if b.stage(worker) == stage
        and w.inbox is not None
        and worker in beating
        and b.numerics(worker) in allowed
        and b.may_share(worker, me)
        and (keeps or not w.retires or not b.rules.retiring_are_in_no_new_route)
    ]


def takes(b: Bounds, redis: Redis, me: int, gpu: bool, beating: Sequence[int]) -> bool:
    """Whether requests for GPUs, or for CPUs, are mine to claim."""
    return b.is_gpu(me) == gpu or not any(
        w.inbox is not None and worker in beating and b.stage(worker) == 0 and b.is_gpu(worker) == gpu
        for worker, w in redis.workers
    )


def has_gpu(b: Bounds, redis: Redis, me: int, stage: int, beating: Sequence[int]) -> bool:
    """Whether a GPU that lives could compute a stage of what I claim."""
    return any(b.is_gpu(worker) for worker in candidates(b, redis, me, stage, beating, False))


def find_route(
    b: Bounds, redis: Redis, me: int, reserve: int, beating: Sequence[int], latest: bool, pure: bool = False,
    failed: Sequence[int] = (), pages_needed: int = 0, keeps: bool = True, spills: bool = False,
) -> tuple[int, ...]:  # fmt: skip
    """A worker for every stage, me at the front; empty when some stage has no live worker with room for `reserve` pages
    now and a pool for all that are needed. `pure`: none that varies; without `keeps` none that retires. A stage that
    has a GPU waits for it, one in `failed` for a CPU if it has one. With `spills` it does not wait where a CPU has
    room."""
    route: list[int] = []
    if b.numerics(me) not in may_follow(b, redis, me, beating, pure):
        return ()
    for stage in range(b.stages):
        there = candidates(b, redis, me, stage, beating, pure, keeps)
        preferred = [worker for worker in there if b.is_gpu(worker) != (stage in failed)]
        cpus = [worker for worker in there if not b.is_gpu(worker)] if spills and stage not in failed else []
        best = least_loaded(redis, cpus, beating, latest, reserve, pages_needed)
        best = best or least_loaded(redis, preferred or there, beating, latest, reserve, pages_needed)
        if best is None:
            return ()
        route.append(best[1])
    return tuple(route)


def least_loaded(
    redis: Redis, workers: Sequence[int], beating: Sequence[int], latest: bool, reserve: int, pages_needed: int
) -> tuple[int, int] | None:
    """How many requests the least loaded of these `workers` with room has, and which one it is."""
    best: tuple[int, int] | None = None
    for worker in workers:
        w = redis.worker(worker)
        if w is None or w.inbox is None or worker not in beating:
            continue
        spare = max(len(w.on), w.pages // 100) if w.reserved else 0
        if w.pages - w.reserved - spare < reserve or w.pages < pages_needed:
            continue
        if best is None or len(w.on) < best[0] or (latest and len(w.on) == best[0]):
            best = (len(w.on), worker)
    return best


def fits_nowhere(
    b: Bounds, redis: Redis, me: int, pages_needed: int, beating: Sequence[int], pure: bool = False, keeps: bool = True
) -> bool:
    """Whether I, or all live workers of a later stage that may follow me, have pools that even empty would not hold the
    request."""
    if b.numerics(me) not in may_follow(b, redis, me, beating, pure):
        return True
    pools = [
        [
            w.pages
            for worker in candidates(b, redis, me, stage, beating, pure, keeps)
            if (w := redis.worker(worker)) is not None
        ]
        for stage in range(b.stages)
    ]
    return any(max(there, default=-1) < pages_needed for there in pools)
