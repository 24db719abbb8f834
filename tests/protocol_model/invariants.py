"""What holds in every state. The numbers are those of the table in docs/protocol.md."""

from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Client, Record, Redis, State
from tests.protocol_model.worker.handover import OTHER


def broken(b: Bounds, state: State) -> str | None:
    """The first invariant that does not hold, or None."""
    redis = state.redis
    queued = (*(r for _, r in redis.queue), *redis.reruns, *redis.pinned, *redis.delayed)
    for request, record in enumerate(redis.requests):
        if record is None:
            if request in queued or request in redis.running:
                return f"I2: {request} is queued or running without a record"
            continue
        known = tuple(token % OTHER for token in record.log) if b.handover else record.log
        if known != tuple(range(1, len(record.log) + 1)) or len(record.log) > b.tokens:
            return f"I1: the log of {request} is {record.log}"
        if (request in redis.running) == (record.state == "done"):
            return f"I2: {request} is {record.state}, and in `running`: {request in redis.running}"
        if queued.count(request) != (record.state == "queued"):
            return f"I3: {request} is {record.state} and has {queued.count(request)} job entries"
        if (record.state == "running") != bool(record.run and record.route):
            return f"I3: {request} is {record.state} with run {record.run} and route {record.route}"
        if len({b.plan(worker) for worker in record.route}) > 1:
            return f"I17: {request} runs on stages of two plans: {record.route}"
        for worker in record.route:
            known = redis.worker(worker)
            if known is not None and request not in known.on:
                return f"I3: {request} runs on {worker}, which does not carry it"
        if (record.ends != ()) != (record.state == "done") or len(record.ends) > 1:
            return f"I5: {request} is {record.state} with the terminal entries {record.ends}"
        if record.ends == ("denied",) and (record.forsaken or request not in b.deny):
            return f"I16: {request} ended for want of a GPU, which it had, or needed not"
        if record.ends == ("too_slow",) and request not in b.limited:
            return f"I16: {request} ended because a CPU is too slow for it, and it has no limit"
        if record.forsaken or (record.ends == ("numerics",) and request not in b.exact):
            return (
                f"I13: {request} was taken or ended while its numerics id was served: {record.numerics} {record.ends}"
            )
        if request in b.exact and any(b.varies(own) for own, _ in record.numerics):
            return f"I13: {request} asked for exact tokens and had those of a device that varies: {record.numerics}"
        if [at for _, at in record.numerics] != sorted(at for _, at in record.numerics):
            return f"I13: nobody knows which numerics id computed which tokens of {request}: {record.numerics}"
        if record.ends == ("length",) and len(record.log) != b.tokens:
            return f"I5: {request} ended as complete with {len(record.log)} of {b.tokens} tokens"
    for request, length in state.overdue:
        record = redis.requests[request]
        if record is not None and len(record.log) > length:
            return f"I12: {request} got tokens behind its deadline: {record.log}"
    return (
        _reservations(redis)
        or _letters(b, redis)
        or _handover(b, state)
        or _clients(b, state)
        or _promises(b, state)
        or _fairness(b, state)
        or _precisions(b, state)
    )


def _reservations(redis: Redis) -> str | None:
    for worker, w in redis.workers:
        pages_reserved = 0
        for request in w.on:
            record = redis.requests[request]
            if record is None or record.state != "running" or worker not in record.route:
                return f"I3: {request} is on worker {worker}, where it does not run"
            pages_reserved += record.pages_reserved
        if w.reserved != pages_reserved:
            return f"I4: worker {worker} has {w.reserved} pages reserved, its runs hold {pages_reserved}"
        if w.reserved > w.pages:
            return f"I4: worker {worker} has {w.reserved} of {w.pages} pages reserved"
    return None


def _letters(b: Bounds, redis: Redis) -> str | None:
    """More kills by chance at one length than trials are allowed would be indistinguishable from poison."""
    for request in redis.letters:
        record = redis.requests[request]
        last = record.trials[-b.max_quarantine_deaths :] if record is not None else ()
        if len(last) < b.max_quarantine_deaths or len(set(last)) > 1:
            return f"I7: {request} is a dead letter after it died alone at lengths {last}"
        if request not in b.poison and b.faults.kill <= b.max_quarantine_deaths:
            return f"I7: {request} is a dead letter and did nothing wrong"
    if len(set(redis.letters)) != len(redis.letters):
        return f"I7: one dead letter twice: {redis.letters}"
    return None


def _handover(b: Bounds, state: State) -> str | None:
    """What devices that vary have made stays with the request; nobody takes their place where that is denied."""
    if not b.handover:
        return None
    for process in state.processes:
        for run in process.table:
            record = state.redis.requests[run.request_id]
            if run.wrong and record is not None and record.run == run.run:
                return f"I15: {run.request_id} is computed on {run.wrong}, and its tokens are {run.tokens}"
    for page in state.stored:
        if page.varied and page.root < 0:
            return f"I15: a page that a device which varies has made is named by its tokens alone: {page}"
    f = b.faults  # a Redis that forgets a drain finds a worker that is silent
    failures = f.kill or f.retire or f.pause or f.device or f.early_dead or f.restart or f.failover
    for request, record in enumerate(state.redis.requests):
        if record is None:
            continue
        steady = not any(b.varies(own) for own, _ in record.numerics)
        if steady and any(token > OTHER for token in record.log):
            return f"I15: {request} has tokens {record.log}, under a numerics id that no device which varies has"
        if request in b.deny and any(not b.is_gpu(record.route[s]) for s in record.places if record.route):
            return f"I16: {request} denies that a CPU takes the place of a GPU that failed: route {record.route}"
        if request in b.limited and record.failed:
            return f"I16: a CPU is too slow for {request}, and one has the place of a GPU that failed: {record}"
        if not failures and (record.failed or record.denied or record.ends in (("denied",), ("too_slow",))):
            return f"I16: nothing has failed, and {request} says so: {record}"
    return None


def _clients(b: Bounds, state: State) -> str | None:
    for number, client in enumerate(state.clients):
        seen = tuple(token % OTHER for token in client.seen) if b.handover else client.seen
        if seen != tuple(range(1, len(client.seen) + 1)):
            return f"I8: client {number} has seen {client.seen}"
        if client.ended == "length" and len(client.seen) != b.tokens:
            return f"I8: client {number} was told the end after {client.seen}"
        if client.ended not in ("", "length", "accepted") and not b.faults.deadline and not b.faults.cancel:
            return f"I8: client {number} was told {client.ended}, which nobody wanted"
        record = state.redis.requests[client.request]
        if b.handover:
            if record is not None and (change := _changed(client, record)):
                return f"I8: client {number} has seen {client.seen}, and the log is {record.log}: {change}"
        elif record is not None and any(record.id_of(at) != own for at, own in enumerate(client.by[: len(record.log)])):
            return f"I8: client {number} has tokens of {client.by}, the log of {record.numerics}"
    known = [r for r, record in enumerate(state.redis.requests) if record is not None]
    if state.clients and not b.sessions and len(known) > 1:
        return f"I9: one key has become the requests {known}"
    session = state.redis.session
    if session is not None and session.tokens != tuple(range(1, session.step + 1)):
        return f"I10: a session at step {session.step} holds {session.tokens}"
    return None


def _changed(client: Client, record: Record) -> str | None:
    """A token that was shown and has become another one. Those that no device which varies had a part in are another
    matter: they may be computed by one when it is forgotten who began."""
    for at, (seen, there, by) in enumerate(zip(client.seen, record.log, client.by, strict=False)):
        if by >= 0 and seen != there:
            return f"token {at + 1} has become another one"
    return None


def _promises(b: Bounds, state: State) -> str | None:
    """What was told when the replicas had it."""
    if not b.replicas:
        return None
    session = state.redis.session
    for number, client in enumerate(state.clients):
        if b.sessions:
            held = session.step if session is not None else 0
            if client.step - 1 > held:
                return f"I14: client {number} has the answer of step {client.step - 1}, and its session {held} steps"
        elif client.posted and state.redis.requests[client.request] is None and not b.faults.forget:
            return f"I14: client {number} was told that {client.request} is accepted, and there is no record"
    for request in state.cancelled:
        record = state.redis.requests[request]
        if record is not None and record.ends != ("cancelled",):
            return f"I14: {request} was cancelled and is {record.state} {record.ends}"
    return None


def _fairness(b: Bounds, state: State) -> str | None:
    """While a tenant waits, the others get no more than one request each and what was claimed with them."""
    for tenant, passed in enumerate(state.passed):
        if passed > b.room * (len(state.passed) - 1) + 1:
            return f"I11: tenant {tenant} waits while others were given {passed} requests"
    return None


def _precisions(b: Bounds, state: State) -> str | None:
    """While no worker has died, and Redis has lost nothing, a change of precision changes no request that has begun."""
    if not b.faults.change:
        return None
    f, left = b.faults, state.budget
    deaths = ("kill", "retire", "pause", "restart", "failover", "early_dead")
    undisturbed = all(getattr(f, fault) == getattr(left, fault) for fault in deaths)
    for request, record in enumerate(state.redis.requests):
        if record is None:
            continue
        if record.late:
            return f"I18: {request} began under a numerics id of which all workers retire: {record.numerics}"
        if undisturbed and (len(record.numerics) > 1 or record.ends == ("numerics",)):
            return f"I18: a change of precision has {request} go on elsewhere: {record.numerics} {record.ends}"
    return None
