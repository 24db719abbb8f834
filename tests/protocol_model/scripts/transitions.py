"""All scripts but CLAIM, and the plain commands of workers."""

from collections.abc import Sequence

from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Commit, NextJob, Record, Redis, Session, WorkerRecord
from tests.protocol_model.scripts.queueing import again, end, enqueue, grow, promote, queue_up, with_, without
from tests.protocol_model.scripts.serving import served


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
    for_gpu = b.handover and b.for_gpu and not (request in b.exact and b.rules.exact_are_for_cpus)
    record = Record(pages_needed=pages_needed, tenant=tenant, body=body, for_gpu=for_gpu)
    redis = redis.with_request(request, record)
    redis = redis._replace(running=with_(redis.running, request))
    return queue_up(b, redis, request, tenant, pages_needed), ("OK", 0)


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
    flagged = record.flagged
    if b.handover and (record.private if rules.private_tokens_say_so else b.varies(record.own_id)):
        flagged = (*flagged, *range(len(record.log), len(record.log) + len(fresh)))
    record = record._replace(log=record.log + fresh, flagged=flagged)
    redis = redis.with_request(request, record)
    if item.end:
        redis = end(b, redis, request, item.end)
    elif len(record.route) > 1 and fresh:
        redis = grow(b, redis, request)
        grown = redis.requests[request]
        if grown is None or grown.state != "running":
            return redis, "OK"  # it gave way
        first = redis.worker(record.route[0])
        if first is not None and first.inbox is not None:
            job = NextJob(request, item.run, item.position, item.tokens)
            redis = redis.with_worker(record.route[0], first._replace(inbox=(*first.inbox, job)))
        else:
            redis = again(b, redis, request, "no_inbox")
    return redis, "OK"


def rerun(
    b: Bounds, redis: Redis, request: int, run: int, reason: str, *, failed: int = -1, found: int = -1
) -> tuple[Redis, bool]:  # fmt: skip
    record = redis.requests[request]
    if record is None or record.state == "done":
        return redis, False
    if b.rules.rerun_checks_run and (record.state != "running" or record.run != run):
        return redis, False
    return again(b, redis, request, reason, failed=failed, found=found), True


def finish(
    b: Bounds,
    redis: Redis,
    request: int,
    reason: str,
    run: int = 0,
    *,
    denied: bool = False,
    abandoned: bool = False,
) -> tuple[Redis, str]:
    """`denied`: only while it waits for a GPU. `abandoned`: nobody reads it, and ACCEPT of the same id may begin it
    anew."""
    record = redis.requests[request]
    if record is None:
        return redis, "UNKNOWN"
    if b.rules.terminal_absorbs and record.state == "done":
        return redis, "DONE"
    if (run and record.run != run) or (denied and not record.denied):
        return redis, "LOST"
    redis = end(b, redis, request, reason)
    record = redis.requests[request]
    assert record is not None
    return redis.with_request(request, record._replace(abandoned=abandoned)), "FINISHED"


def dead(b: Bounds, redis: Redis, worker: int, reason: str = "death") -> tuple[Redis, tuple[bool, int]]:
    w = redis.worker(worker)
    if w is None:
        return redis, (False, 0)
    count, failure = 0, reason == "death" or not b.rules.drains_are_no_failures
    failed = b.stage(worker) if b.is_gpu(worker) and failure else -1
    for request in w.on:
        record = redis.requests[request]
        if record is None or record.state != "running" or worker not in record.route:
            continue
        if b.rules.dead_reruns_all or record.route[0] == worker:
            redis = again(b, redis, request, reason, w.quarantine, failed=failed)
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
        redis = enqueue(b, redis._replace(pinned=without(redis.pinned, request)), request, record, freed=True)
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
