"""What scripts share (`lib/` of the Lua sources): how a request is queued, leaves the queue, runs again and ends."""

from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Record, Redis


def without(items: tuple[int, ...], item: int) -> tuple[int, ...]:
    return tuple(i for i in items if i != item)


def with_(items: tuple[int, ...], item: int) -> tuple[int, ...]:
    return tuple(sorted({*items, item}))


def with_all(items: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*items, *others}))


def release(b: Bounds, redis: Redis, request: int) -> Redis:
    """Give back what a run holds on the workers of its route."""
    record = redis.requests[request]
    assert record is not None
    for worker in record.route:
        w = redis.worker(worker)
        if w is None or not b.rules.release_gives_back:
            continue
        if request in w.on:
            w = w._replace(on=without(w.on, request), reserved=w.reserved - record.pages_reserved)
        if w.quarantine == request:
            w = w._replace(quarantine=None)
        redis = redis.with_worker(worker, w)
    return redis


def pages_now(b: Bounds, record: Record) -> int:
    """Pages of the prompt, the tokens so far and the next one, as far as they are needed."""
    return min(record.pages_needed, b.prompt + len(record.log) + 1)


def grow(b: Bounds, redis: Redis, request: int) -> Redis:
    """`grow` of the prelude: reserve more pages for a run of several stages. Where a worker has too few, requests that
    were accepted later give way, the last one first, or this one if theirs are too few."""
    record = redis.requests[request]
    assert record is not None
    more = pages_now(b, record) - record.pages_reserved
    if more <= 0 or not b.rules.commit_reserves_more:
        return redis
    leaving = set[int]()
    for worker in record.route:
        w = redis.worker(worker)
        lacking = 0 if w is None else more - (w.pages - w.reserved)
        for other in sorted(w.on, reverse=True) if w is not None else ():  # by the order in which they were accepted
            if lacking <= 0 or not b.rules.growing_takes_from_the_youngest:
                break
            if other == request:
                return again(b, redis, request, "preempted")
            holder = redis.requests[other]
            assert holder is not None
            leaving.add(other)
            lacking -= holder.pages_reserved
    for other in sorted(leaving):
        redis = again(b, redis, other, "preempted")
    for worker in record.route:
        w = redis.worker(worker)
        if w is not None and request in w.on:
            redis = redis.with_worker(worker, w._replace(reserved=w.reserved + more))
    return redis.with_request(request, record._replace(pages_reserved=record.pages_reserved + more))


def unqueue(b: Bounds, redis: Redis, request: int) -> Redis:
    if not b.rules.end_unqueues:
        return redis
    return redis._replace(
        queue=tuple(q for q in redis.queue if q[1] != request),
        reruns=without(redis.reruns, request),
        pinned=without(redis.pinned, request),
        delayed=without(redis.delayed, request),
    )


def end(b: Bounds, redis: Redis, request: int, reason: str) -> Redis:
    """`finish` of the prelude: the terminal entry."""
    redis = unqueue(b, release(b, redis, request), request)
    record = redis.requests[request]
    assert record is not None
    if record.job == "queue":  # its tenant has not had its share of it
        shares = tuple((t, rank - record.pages_needed) if t == record.tenant else (t, rank) for t, rank in redis.shares)
        redis = redis._replace(shares=shares)
    record = record._replace(
        state="done", run=0, route=(), job="", pages_needed=0, pages_reserved=0, deaths=0, quarantine_deaths=0,
        attempts=0, deaths_at=0,
        ends=(*record.ends, reason), for_gpu=False, failed=(), denied=(), private=False, reusable=-1, missing_pages=0,
        flagged=tuple(range(len(record.log))) if record.private else (), places=(),
    )  # fmt: skip
    return redis.with_request(request, record)._replace(running=without(redis.running, request))


def queue_up(b: Bounds, redis: Redis, request: int, tenant: int, cost: int) -> Redis:
    """Start-time fair queueing: behind the tenant's request before, but never behind what was claimed last."""
    if not redis.queue:
        redis = redis._replace(shares=(), virtual=0)
    shares = dict(redis.shares)
    rank = max(redis.virtual, shares.get(tenant, 0)) if b.rules.queue_is_fair else redis.virtual
    shares[tenant] = rank + cost
    queue = tuple(sorted((*redis.queue, (rank, request))))
    return redis._replace(queue=queue, shares=tuple(sorted(shares.items())))


def advance(redis: Redis, rank: int) -> Redis:
    """The virtual time follows what is claimed; shares behind it are forgotten."""
    shares = tuple((tenant, at) for tenant, at in redis.shares if at >= rank)
    return redis._replace(virtual=max(redis.virtual, rank), shares=shares)


def promote(b: Bounds, redis: Redis) -> Redis:
    """Delayed re-runs that are due join the others. Here a delay may be over at any moment, so all are due."""
    if not b.rules.delayed_are_promoted:
        return redis
    for request in redis.delayed:
        record = redis.requests[request]
        if record is not None and record.state == "queued" and record.job == "delayed":
            redis = enqueue(b, redis, request, record)
    return redis._replace(delayed=())


def enqueue(b: Bounds, redis: Redis, request: int, record: Record, *, freed: bool = False) -> Redis:
    """A log with tokens waits for a worker of the numerics id that computed them, unless it was `freed`."""
    if b.pinned(record) and b.rules.pinned_wait and not freed:
        return redis.with_request(request, record._replace(job="pinned"))._replace(pinned=(*redis.pinned, request))
    return redis.with_request(request, record._replace(job="reruns"))._replace(reruns=(*redis.reruns, request))


def again(
    b: Bounds, redis: Redis, request: int, reason: str, tried: int | None = None, *, failed: int = -1, found: int = -1
) -> Redis:  # fmt: skip
    """`rerun` of the prelude: end the current run and queue the request once more.

    `failed`: the stage whose GPU failed; `found`: how many units had pages in a stage that lacked some (-1: neither).
    """
    record = redis.requests[request]
    assert record is not None
    deaths, quarantine_deaths, attempts = record.deaths, record.quarantine_deaths, record.attempts
    if b.rules.deaths_need_unchanged_length and record.deaths_at != len(record.log):
        deaths = quarantine_deaths = attempts = 0
    if not b.rules.only_the_tried_is_blamed:
        tried = request if deaths >= b.quarantine_after else None
    nearer = found >= 0 and (record.reusable < 0 or found < record.reusable) and b.rules.found_limits_the_next
    if nearer:
        record = record._replace(reusable=found)
    if b.handover and reason == "missing_pages":
        record = record._replace(missing_pages=min(record.missing_pages + 1, 2))
    if failed >= 0:
        record = _failed(b, request, record, failed)
    blameless = reason in ("drain", "preempted") or nearer
    blameless = blameless or (reason == "death" and tried is not None and tried != request)
    if reason == "death" and not blameless and b.quarantine_after:
        deaths = min(deaths + 1, b.quarantine_after)
        quarantine_deaths += tried is not None
        if tried is not None:
            record = record._replace(trials=(*record.trials, len(record.log)))
        if quarantine_deaths >= b.max_quarantine_deaths:
            redis = redis.with_request(request, record)._replace(letters=(*redis.letters, request))
            return end(b, redis, request, "poison")
    if failed >= 0 and request in b.limited and b.rules.slow_stand_ins_end_it:
        return end(b, redis.with_request(request, record), request, "too_slow")
    if not blameless and b.delays:
        attempts = min(attempts + 1, 2)
    redis = release(b, redis, request)
    later = attempts > 1 and not blameless
    record = record._replace(
        state="queued",
        run=0,
        route=(),
        pages_reserved=0,
        job="delayed" if later else "",
        deaths=deaths,
        quarantine_deaths=quarantine_deaths,
        attempts=attempts,
        deaths_at=len(record.log) if b.quarantine_after or b.delays else 0,
    )
    if later:
        return redis.with_request(request, record)._replace(delayed=with_(redis.delayed, request))
    return enqueue(b, redis, request, record, freed=failed >= 0)


def _failed(b: Bounds, request: int, record: Record, stage: int) -> Record:
    """The GPU of a stage has failed under a request that is running."""
    gpus = tuple(at for at, worker in enumerate(record.route) if b.is_gpu(worker))
    record = record._replace(places=with_all(record.places, gpus))
    if request in b.deny:
        denied = gpus if b.rules.denied_wait_for_all_gpus else (stage,)
        return record._replace(denied=with_all(denied, (stage,)))
    return record._replace(failed=with_(record.failed, stage), for_gpu=record.for_gpu and stage > 0)
