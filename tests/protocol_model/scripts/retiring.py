"""What a worker that retires writes and reads: it marks its record, and looks whether it may go (`retirement.py`).

The plan gives it another block folder, so that it will compute under another numerics id.
"""

from collections.abc import Sequence

from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Redis
from tests.protocol_model.scripts.serving import served

#: More pages than any pool has.
MORE_THAN_ANY = 1 << 30


def look(b: Bounds, redis: Redis, me: int, *, told: Sequence[int], beating: Sequence[int]) -> tuple[Redis, bool]:
    """Whether a worker may go: no request needs its numerics id, or workers that stay could take them over.

    `told`: workers to which the plan gives another folder. A worker whose record does not say that it retires writes
    so, and looks next time.
    """
    mine = redis.worker(me)
    if mine is None:
        return redis, False
    if not mine.retires and b.rules.retiring_say_so_first:
        return redis.with_worker(me, mine._replace(retires=True)), False
    needed = pages_left(b, redis, me, beating)
    if needed is None or not b.rules.retiring_stay_while_needed:
        return redis, True
    staying = [
        worker
        for worker, w in redis.workers
        if b.numerics(worker) == b.numerics(me)
        and b.plan(worker) == b.plan(me)
        and worker not in told
        and worker in beating
        and w.inbox is not None
        and not w.retires
        and (w.pages >= needed or not b.rules.others_must_hold_what_is_left)
    ]
    return redis, len({b.stage(worker) for worker in staying}) == b.stages


def pages_left(b: Bounds, redis: Redis, me: int, beating: Sequence[int]) -> int | None:
    """Pages of the largest request that needs a worker's numerics id, 0 if one only runs on it; None: there is none.

    More than any pool has, while a request runs on it that any other id could take over. One that MIGRATE has freed
    needs it while a route of that id could hold it.
    """
    mine = redis.worker(me)
    needed = [0] if mine is not None and mine.on else []
    for record in redis.requests:
        if record is None or record.state == "done" or not (record.log or record.state == "running"):
            continue
        own = record.own_id if record.numerics else -1
        if me in record.route and b.varies(own) and b.rules.varying_end_where_they_run:
            return MORE_THAN_ANY
        if own != b.numerics(me) or b.varies(own):
            continue
        freed = record.job == "reruns" and b.rules.freed_need_a_whole_route
        if not freed or served(b, redis, own, record.pages_needed, beating):
            needed.append(record.pages_needed)
    return max(needed, default=None)


def stay(redis: Redis, me: int) -> Redis:
    """Its own folder is in force again: it takes new requests."""
    mine = redis.worker(me)
    return redis if mine is None else redis.with_worker(me, mine._replace(retires=False))
