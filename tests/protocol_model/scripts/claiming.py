"""CLAIM: who gets which request, and with which route."""

from collections.abc import Sequence
from typing import NamedTuple

from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Record, Redis
from tests.protocol_model.scripts.queueing import advance, end, enqueue, pages_now, promote, unqueue, with_
from tests.protocol_model.scripts.serving import find_route, fits_nowhere, has_gpu, served, takes

LARGE = 1 << 30


class Claimed(NamedTuple):
    request: int
    run: int
    route: tuple[int, ...]
    quarantined: bool
    committed: int  # tokens in the log
    reusable: int = -1  # leading units that may be found (-1: any)
    private: bool = False


def claim(
    b: Bounds, redis: Redis, me: int, most: int, nonces: Sequence[int], *, beating: Sequence[int],
    free: int = 0, overdue: Sequence[int] = (), latest: bool = False, spill: int = -1,
) -> tuple[Redis, list[Claimed]]:  # fmt: skip
    """`beating`: workers whose last beat is not old. `free`: pages that a worker of the whole model can give.

    `latest`: of equally loaded workers the one with the largest id, not the smallest. `spill`: so many requests wait
    for GPUs before the first that ends sooner on a CPU (-1: none does).
    """
    mine = redis.worker(me)
    if mine is None or mine.inbox is None or b.stage(me) != 0:
        return redis, []
    redis = promote(b, redis)
    if not find_route(b, redis, me, -LARGE, beating, latest):
        return redis, []  # some stage has no live worker
    answer: list[Claimed] = []
    for rank, request in _offered(b, redis, me, beating, spill):
        if len(answer) >= most:
            break
        record = redis.requests[request]
        if record is None or record.state != "queued":
            redis = unqueue(b, redis, request)
            continue
        if request in overdue and b.rules.deadlines_are_kept:
            redis = end(b, redis, request, "expired")
            continue
        keeps = bool(b.ids) and b.pinned(record) and record.own_id == b.numerics(me)
        if mine.retires and b.rules.retiring_take_nothing_new and not keeps:
            continue
        pure = request in b.exact
        if b.ids and b.pinned(record):
            lives = served(b, redis, record.own_id, record.pages_needed, beating)
            if keeps:
                pure = pure or lives or record.job == "pinned"
            elif lives and b.rules.pinned_wait and b.rules.freed_ask_again:
                redis = enqueue(b, unqueue(b, redis, request), request, record)
                continue
            else:
                record = record._replace(forsaken=lives)
                if request in b.exact:
                    redis = end(b, redis.with_request(request, record), request, "numerics")
                    continue
        quarantined = 0 < b.quarantine_after <= record.deaths and record.deaths_at == len(record.log)
        if any(c.quarantined for c in answer) or (quarantined and answer):  # it comes alone
            break
        pages_reserved = now = pages_now(b, record)
        if b.stages == 1:
            if record.pages_needed > mine.pages:
                if b.rules.claim_skips_what_fits_nowhere:
                    continue
                break
            if now > free:
                break
            pages_reserved = 0
        reserve = pages_reserved if b.rules.claim_reserves else 0
        if b.rules.denied_wait and not all(has_gpu(b, redis, me, stage, beating) for stage in record.denied):
            continue
        spills = spill >= 0 and not pure and may_spill(b, request, record)
        needed = record.pages_needed
        route = find_route(b, redis, me, reserve, beating, latest, pure, record.failed, needed, keeps, spills)
        if not route:
            if (
                b.stages > 1
                and record.log
                and needed > mine.pages
                and served(b, redis, b.numerics(me), needed, beating)
            ):
                break
            if b.rules.claim_skips_what_fits_nowhere and fits_nowhere(b, redis, me, needed, beating, pure, keeps):
                continue
            break
        if b.stages == 1:
            free -= now
        numerics = record.numerics if record.log else ()
        if b.ids and (not numerics or record.own_id != b.route_numerics(route)):
            numerics = (*numerics, (b.route_numerics(route), len(record.log)))
        kept = bool(record.log) or not b.rules.begins_anew_without_a_token
        private = b.handover and (b.varies(b.route_numerics(route)) or (record.private and kept))
        for worker in route:
            w = redis.worker(worker)
            assert w is not None
            w = w._replace(
                on=with_(w.on, request), reserved=w.reserved + (pages_reserved if b.rules.claim_reserves else 0)
            )
            redis = redis.with_worker(worker, w._replace(quarantine=request) if quarantined and worker == me else w)
        redis = unqueue(b, redis, request)
        run = nonces[len(answer)]
        record = record._replace(
            state="running",
            run=run,
            route=route,
            job="",
            pages_reserved=pages_reserved if b.rules.claim_reserves else 0,
            numerics=numerics,
            private=private,
            denied=(),
            places=tuple(stage for stage in record.places if not b.is_gpu(route[stage])),
            late=bool(b.ids) and not record.log and _has_retired(b, redis, route),
        )
        redis = redis.with_request(request, record)
        found = _reusable(b, request, record)
        answer.append(Claimed(request, run, route, quarantined, len(record.log), found, private))
        if rank >= 0:
            redis = advance(redis, rank)
    return redis, answer


def may_spill(b: Bounds, request: int, record: Record) -> bool:
    """Whether a request that has no token yet leaves it to us which devices compute it."""
    return not record.log and not record.failed and request not in b.exact and request not in b.deny


def _offered(b: Bounds, redis: Redis, me: int, beating: Sequence[int], spill: int) -> list[tuple[int, int]]:
    """Rank (-1: no time passes for the queue, as for re-runs) and request, in the order in which I look at them. The
    class of my device comes first, the other one is mine where no such device lives, or from a place in its queue on
    where it spills; what waits for my numerics id is mine in any class."""
    me_there = redis.worker(me)
    retires = me_there is not None and me_there.retires and b.rules.retiring_take_nothing_new
    classes = (b.is_gpu(me), not b.is_gpu(me))
    taken = [gpu for gpu in classes if takes(b, redis, me, gpu, beating)]
    offered = list[tuple[int, int]]()
    mine = [r for r in redis.pinned if (p := redis.requests[r]) is None or p.own_id == b.numerics(me)]
    for gpu in classes:
        if gpu in taken or b.rules.pinned_of_all_classes_are_taken:
            offered += [(-1, r) for r in mine if _is_of(redis, r, gpu)]
        if gpu in taken and (not retires or b.rules.retiring_take_what_was_freed):
            offered += [(-1, r) for r in redis.reruns if _is_of(redis, r, gpu)]
    for gpu in taken if not retires else ():
        offered += [(rank, r) for rank, r in redis.queue if _is_of(redis, r, gpu)]
    if spill >= 0 and not retires and not b.is_gpu(me) and True not in taken:
        waiting = [r for _, r in redis.queue if _is_of(redis, r, True)][spill:]
        offered += [(-1, r) for r in waiting if (p := redis.requests[r]) is not None and may_spill(b, r, p)]
    return offered


def _has_retired(b: Bounds, redis: Redis, route: Sequence[int]) -> bool:
    """Whether all workers of a numerics id of the route retire."""
    return any(
        all(w.retires for worker, w in redis.workers if b.numerics(worker) == own)
        for own in {b.numerics(worker) for worker in route}
    )


def _is_of(redis: Redis, request: int, gpu: bool) -> bool:
    record = redis.requests[request]
    return not gpu if record is None else record.for_gpu == gpu


def _reusable(b: Bounds, request: int, record: Record) -> int:
    """How many leading units of a run may be found."""
    if (record.missing_pages >= 2 and not record.private) or (request in b.recompute and record.failed):
        return 0
    return record.reusable
