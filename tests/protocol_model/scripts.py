"""The ten scripts as atomic steps, one function each, under the names of their Lua files; PLAN writes nothing that a
request depends on and is left out. Arguments and answers are those of the Lua scripts as far as the model has them;
`overdue` stands for the clock: requests whose deadline has passed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tests.protocol_model.data import Bounds, Commit, NextJob, Record, Redis, Session, WorkerRecord
from tests.protocol_model.serving import find_route, fits_nowhere, served

LARGE = 1 << 30


class Claimed(NamedTuple):
    request: int
    run: int
    route: tuple[int, ...]
    quarantined: bool
    committed: int  # tokens in the log


def _without(items: tuple[int, ...], item: int) -> tuple[int, ...]:
    return tuple(i for i in items if i != item)


def _with(items: tuple[int, ...], item: int) -> tuple[int, ...]:
    return tuple(sorted({*items, item}))


# --- prelude ---


def release(b: Bounds, redis: Redis, request: int) -> Redis:
    """Give back what a run holds on the workers of its route."""
    record = redis.requests[request]
    assert record is not None
    for worker in record.route:
        w = redis.worker(worker)
        if w is None or not b.rules.release_gives_back:
            continue
        if request in w.on:
            w = w._replace(on=_without(w.on, request), reserved=w.reserved - record.pages_reserved)
        if w.quarantine == request:
            w = w._replace(quarantine=None)
        redis = redis.with_worker(worker, w)
    return redis


def unqueue(b: Bounds, redis: Redis, request: int) -> Redis:
    if not b.rules.end_unqueues:
        return redis
    return redis._replace(
        queue=tuple(q for q in redis.queue if q[1] != request),
        reruns=_without(redis.reruns, request),
        pinned=_without(redis.pinned, request),
        delayed=_without(redis.delayed, request),
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
        ends=(*record.ends, reason),
    )  # fmt: skip
    return redis.with_request(request, record)._replace(running=_without(redis.running, request))


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


def again(b: Bounds, redis: Redis, request: int, reason: str, tried: int | None = None) -> Redis:
    """`rerun` of the prelude: end the current run and queue the request once more."""
    record = redis.requests[request]
    assert record is not None
    deaths, quarantine_deaths, attempts = record.deaths, record.quarantine_deaths, record.attempts
    if b.rules.deaths_need_unchanged_length and record.deaths_at != len(record.log):
        deaths = quarantine_deaths = attempts = 0
    if not b.rules.only_the_tried_is_blamed:
        tried = request if deaths >= b.quarantine_after else None
    blameless = reason == "drain" or (reason == "death" and tried is not None and tried != request)
    if reason == "death" and not blameless and b.quarantine_after:
        deaths = min(deaths + 1, b.quarantine_after)
        quarantine_deaths += tried is not None
        if tried is not None:
            record = record._replace(trials=(*record.trials, len(record.log)))
        if quarantine_deaths >= b.max_quarantine_deaths:
            redis = redis.with_request(request, record)._replace(letters=(*redis.letters, request))
            return end(b, redis, request, "poison")
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
        return redis.with_request(request, record)._replace(delayed=_with(redis.delayed, request))
    return enqueue(b, redis, request, record)


# --- the scripts ---


def accept(
    b: Bounds, redis: Redis, request: int, *, tenant: int = 0, pages_needed: int = 0, step: int = 0,
    prior: int = 0, body: tuple[int, ...] = (),
) -> tuple[Redis, tuple[str, int]]:  # fmt: skip
    """`step` > 0: of the session, whose tokens before it number `prior`."""
    record = redis.requests[request]
    forgotten = record is not None and record.abandoned and b.rules.abandoned_begin_anew
    if record is not None and not forgotten and b.rules.accept_is_idempotent:
        return redis, ("EXISTS", 0)
    if step:
        session = redis.session or Session()
        tokens = (*session.tokens, step)
        if not b.rules.steps_are_compared:
            pass
        elif step == session.step:
            previous = redis.requests[session.request]
            if previous is not None and previous.ends in ((), ("tensor",)):
                return redis, ("REPEAT", session.request)
            tokens = session.tokens
        elif step != session.step + 1 or len(session.tokens) != prior:
            return redis, ("STEP", session.step + 1)
        redis = redis._replace(session=Session(step, request, tokens))
    redis = redis.with_request(request, Record(pages_needed=pages_needed, tenant=tenant, body=body))
    redis = redis._replace(running=_with(redis.running, request))
    return queue_up(b, redis, request, tenant, pages_needed), ("OK", 0)


def claim(
    b: Bounds, redis: Redis, me: int, most: int, nonces: Sequence[int], *, beating: Sequence[int],
    free: int = 0, overdue: Sequence[int] = (), latest: bool = False,
) -> tuple[Redis, list[Claimed]]:  # fmt: skip
    """`beating`: workers whose last beat is not old. `free`: pages that a worker of the whole model can give.

    `latest`: of equally loaded workers the one with the largest id, not the smallest.
    """
    mine = redis.worker(me)
    if mine is None or mine.inbox is None or b.stage(me) != 0:
        return redis, []
    redis = promote(b, redis)
    if not find_route(b, redis, me, -LARGE, beating, latest):
        return redis, []  # some stage has no live worker
    answer: list[Claimed] = []
    mine_first = [r for r in redis.pinned if (p := redis.requests[r]) is None or p.own_id == b.numerics(me)]
    for rank, request in (*((-1, r) for r in (*mine_first, *redis.reruns)), *redis.queue):
        if len(answer) >= most:
            break
        record = redis.requests[request]
        if record is None or record.state != "queued":
            redis = unqueue(b, redis, request)
            continue
        if request in overdue and b.rules.deadlines_are_kept:
            redis = end(b, redis, request, "expired")
            continue
        pure = request in b.exact
        if b.ids and b.pinned(record):
            lives = served(b, redis, record.own_id, record.pages_needed, beating)
            if record.own_id == b.numerics(me):
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
        pages_reserved, now = record.pages_needed, b.prompt + len(record.log) + 1
        if b.stages == 1:
            if record.pages_needed > mine.pages:
                if b.rules.claim_skips_what_fits_nowhere:
                    continue
                break
            if now > free:
                break
            pages_reserved = 0
        reserve = pages_reserved if b.rules.claim_reserves else 0
        route = find_route(b, redis, me, reserve, beating, latest, pure)
        if not route:
            if b.rules.claim_skips_what_fits_nowhere and fits_nowhere(b, redis, me, record.pages_needed, beating, pure):
                continue
            break
        if b.stages == 1:
            free -= now
        numerics = record.numerics if record.log else ()
        if b.ids and (not numerics or record.own_id != b.route_numerics(route)):
            numerics = (*numerics, (b.route_numerics(route), len(record.log)))
        for worker in route:
            w = redis.worker(worker)
            assert w is not None
            w = w._replace(
                on=_with(w.on, request), reserved=w.reserved + (pages_reserved if b.rules.claim_reserves else 0)
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
        )
        redis = redis.with_request(request, record)
        answer.append(Claimed(request, run, route, quarantined, len(record.log)))
        if rank >= 0:
            redis = advance(redis, rank)
    return redis, answer


def commit(
    b: Bounds, redis: Redis, items: Sequence[Commit], *, overdue: Sequence[int] = ()
) -> tuple[Redis, list[tuple[str, int]]]:
    answers: list[tuple[str, int]] = []
    for item in items:
        redis, verdict = _commit_one(b, redis, item, overdue)
        record = redis.requests[item.request]
        answers.append((verdict, len(record.log) if record else 0))
    return redis, answers


def _commit_one(b: Bounds, redis: Redis, item: Commit, overdue: Sequence[int]) -> tuple[Redis, str]:
    request, rules = item.request, b.rules
    record = redis.requests[request]
    if record is None:
        return redis, "LOST"
    if rules.commit_checks_run and (record.state != "running" or record.run != item.run):
        return redis, "LOST"
    if rules.terminal_absorbs and record.state == "done":
        return redis, "LOST"
    if rules.commit_sees_gaps and item.position > len(record.log):
        return redis, "GAP"
    if rules.commit_compares_positions:
        if any(known != token for known, token in zip(record.log[item.position :], item.tokens, strict=False)):
            return redis, "DIVERGED"
        fresh = item.tokens[len(record.log) - item.position :]
    else:
        fresh = item.tokens
    if rules.deadlines_are_kept and request in overdue:
        return end(b, redis, request, "expired"), "EXPIRED"
    record = record._replace(log=record.log + fresh)
    redis = redis.with_request(request, record)
    if item.end:
        redis = end(b, redis, request, item.end)
    elif len(record.route) > 1 and fresh:
        first = redis.worker(record.route[0])
        if first is not None and first.inbox is not None:
            job = NextJob(request, item.run, item.position, item.tokens)
            redis = redis.with_worker(record.route[0], first._replace(inbox=(*first.inbox, job)))
        else:
            redis = again(b, redis, request, "no_inbox")
    return redis, "OK"


def rerun(b: Bounds, redis: Redis, request: int, run: int, reason: str) -> tuple[Redis, bool]:
    record = redis.requests[request]
    if record is None or record.state == "done":
        return redis, False
    if b.rules.rerun_checks_run and (record.state != "running" or record.run != run):
        return redis, False
    return again(b, redis, request, reason), True


def finish(
    b: Bounds, redis: Redis, request: int, reason: str, run: int = 0, *, abandoned: bool = False
) -> tuple[Redis, str]:
    """`abandoned`: nobody reads it, and ACCEPT of the same id may begin it anew."""
    record = redis.requests[request]
    if record is None:
        return redis, "UNKNOWN"
    if b.rules.terminal_absorbs and record.state == "done":
        return redis, "DONE"
    if run and record.run != run:
        return redis, "LOST"
    redis = end(b, redis, request, reason)
    record = redis.requests[request]
    assert record is not None
    return redis.with_request(request, record._replace(abandoned=abandoned)), "FINISHED"


def dead(b: Bounds, redis: Redis, worker: int, reason: str = "death") -> tuple[Redis, tuple[bool, int]]:
    w = redis.worker(worker)
    if w is None:
        return redis, (False, 0)
    count = 0
    for request in w.on:
        record = redis.requests[request]
        if record is None or record.state != "running" or worker not in record.route:
            continue
        if b.rules.dead_reruns_all or record.route[0] == worker:
            redis = again(b, redis, request, reason, w.quarantine)
            count += 1
    return redis.with_worker(worker, None), (True, count)


def forget(b: Bounds, redis: Redis, request: int) -> tuple[Redis, bool]:
    """Of all that FORGET might take, one request. That nobody reads it is no part of the model: it may go at once."""
    record = redis.requests[request]
    if record is None or (b.rules.only_the_ended_are_forgotten and record.state != "done"):
        return redis, False
    return redis.with_request(request, None), True


def beat(b: Bounds, redis: Redis, worker: int) -> tuple[Redis, dict[int, int] | None]:
    """None: declared dead. Else request -> run of what is on the worker."""
    w = redis.worker(worker)
    if w is None or w.inbox is None:
        return redis, None
    redis = promote(b, redis)
    return redis, {r: record.run for r in w.on if (record := redis.requests[r]) is not None}


def migrate(b: Bounds, redis: Redis, *, beating: Sequence[int]) -> tuple[Redis, int]:
    """Re-runs whose numerics id nobody serves who could hold them may go on under another one. How many."""
    freed = [
        r for r in redis.pinned if (p := redis.requests[r]) and not served(b, redis, p.own_id, p.pages_needed, beating)
    ]
    for request in freed:
        record = redis.requests[request]
        assert record is not None
        redis = enqueue(b, redis._replace(pinned=_without(redis.pinned, request)), request, record, freed=True)
    return redis, len(freed)


# --- plain commands of workers, which are no scripts ---


def announce(redis: Redis, worker: int, pages: int) -> Redis:
    """Say what the worker serves and create its inbox."""
    return redis.with_worker(worker, WorkerRecord(pages=pages))


def take(redis: Redis, worker: int) -> Redis:
    """Read and delete the first next job of an inbox."""
    w = redis.worker(worker)
    assert w is not None and w.inbox
    return redis.with_worker(worker, w._replace(inbox=w.inbox[1:]))


def name(redis: Redis, worker: int, request: int | None) -> Redis:
    """`quarantine:<worker>`: whom it tries alone."""
    w = redis.worker(worker)
    return redis if w is None else redis.with_worker(worker, w._replace(quarantine=request))
