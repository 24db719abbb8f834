"""One state for all that differ only in the names of runs, lives and workers of one stage."""

from collections.abc import Iterator

from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import LIVES, Process, Redis, State


def canonical(b: Bounds, state: State) -> State:
    if state.saved is not None and not (state.budget.restart or state.budget.failover):
        state = state._replace(saved=None)
    slots = _order(b, state)
    worker = _workers(state, slots)
    if any(w not in worker for w, _ in state.rows):  # inboxes that nobody will ever read
        state = state._replace(rows=tuple(r for r in state.rows if r[0] in worker))
    runs: dict[int, int] = {0: 0}
    for run in _runs(state, slots):
        if run not in runs:
            runs[run] = len(runs)
    if all(old == new for old, new in worker.items()) and all(old == new for old, new in runs.items()):
        return state if state.nonce == len(runs) else state._replace(nonce=len(runs))
    redis = _redis(state.redis, worker, runs)
    saved = state.saved and (redis if state.saved is state.redis else _redis(state.saved, worker, runs))
    rows = [(worker[w], tuple([m._replace(run=runs[m.run]) for m in messages])) for w, messages in state.rows]
    rows.sort(key=_first)
    return state._replace(
        redis=redis,
        processes=tuple([_process(state.processes[slot], worker, runs) for slot in slots]),
        saved=saved,
        rows=tuple(rows),
        nonce=len(runs),
    )


def _first(pair: tuple[int, object]) -> int:
    return pair[0]


def _order(b: Bounds, state: State) -> list[int]:
    """The slots of each stage, sorted by what does not depend on names. Any order is right; a good one saves states."""
    if b.workers == 1:
        return list(range(b.slots))

    def key(slot: int) -> tuple[object, ...]:
        worker = slot * LIVES
        return (slot // b.workers, b.numerics(worker), b.plan(worker), b.pool(worker), _signature(state, slot))

    return sorted(range(b.slots), key=key)


def _signature(state: State, slot: int) -> tuple[object, ...]:
    p = state.processes[slot]
    table = [(r.request_id, r.known, r.computed, r.sequence, r.committed) for r in p.table]
    inbox = state.payload(p.id)
    record = state.redis.worker(p.id)
    seen = (-1, 0, ()) if record is None else (record.reserved, len(record.inbox or ()), record.on)
    old = None if state.saved is None else state.saved.worker(p.id)
    was = (-1, ()) if old is None else (len(old.inbox or ()), old.on)
    about = (p.up, p.ready, p.fresh, p.leaving, p.told, p.going, record is not None and record.retires)
    return (about, table, len(p.pending), -1 if inbox is None else len(inbox), seen, was)


def _workers(state: State, slots: list[int]) -> dict[int, int]:
    """Old worker id -> new one. The life of a slot's process gets the largest number, so that the next one is free."""
    current = [p.id for p in state.processes]
    ids = set(current)
    for redis in (state.redis, state.saved):
        if redis is not None:
            for record in redis.requests:
                if record is not None:
                    ids.update(record.route)
            for worker, _ in redis.workers:
                ids.add(worker)
    for process in state.processes:
        for run in process.table:
            ids.update(run.route)
    new: dict[int, int] = {}
    for place, slot in enumerate(slots):
        mine = [w for w in ids if w // LIVES == slot and w != current[slot]] if len(ids) > len(slots) else []
        mine.sort()  # old lives keep their order: which of them came first is visible nowhere, but this is cheap
        for life, worker in enumerate((*mine, current[slot])):
            new[worker] = place * LIVES + life
    return new


def _runs(state: State, slots: list[int]) -> Iterator[int]:
    for redis in (state.redis, state.saved):
        if redis is None:
            continue
        for record in redis.requests:
            if record is not None:
                yield record.run
        for _, worker in redis.workers:
            for job in worker.inbox or ():
                yield job.run
    for slot in slots:
        process = state.processes[slot]
        for run in process.table:
            yield run.run
        for commit in process.pending:
            yield commit.run
    for _, messages in state.rows:
        for message in messages:
            yield message.run


def _redis(redis: Redis, worker: dict[int, int], runs: dict[int, int]) -> Redis:
    requests = tuple(
        record and record._replace(run=runs[record.run], route=tuple([worker[w] for w in record.route]))
        for record in redis.requests
    )
    workers = tuple(
        sorted(
            (worker[w], v._replace(inbox=v.inbox and tuple([j._replace(run=runs[j.run]) for j in v.inbox])))
            for w, v in redis.workers
        )
    )
    return redis._replace(requests=requests, workers=workers)


def _process(p: Process, worker: dict[int, int], runs: dict[int, int]) -> Process:
    return p._replace(
        id=worker[p.id],
        table=tuple([r._replace(run=runs[r.run], route=tuple([worker[w] for w in r.route])) for r in p.table]),
        pending=tuple([c._replace(run=runs[c.run]) for c in p.pending]),
    )
