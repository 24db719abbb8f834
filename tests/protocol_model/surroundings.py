"""What happens around the workers: the scheduler's rescue, deadlines and decisions, and everything that goes wrong."""

from tests.protocol_model import scripts
from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import LIVES, Process, State
from tests.protocol_model.gateway import may_tell
from tests.protocol_model.worker import retirement
from tests.protocol_model.worker.departure import leaves, passes_on
from tests.protocol_model.worker.table import Steps, beating, next_life, overdue, rerun, spend


def steps(b: Bounds, state: State) -> Steps:
    yield from _scheduler(b, state)
    yield from _decisions(b, state)
    yield from _processes_fail(state)
    yield from _devices_fail(b, state)
    yield from _blocks_move(b, state)
    yield from retirement.steps(b, state)
    yield from _redis_fails(b, state)
    yield from _calls_go_wrong(b, state)


def _scheduler(b: Bounds, state: State) -> Steps:
    """DEAD for registered workers without a young beat; FINISH of what is past its deadline."""
    alive = beating(state)
    for worker, record in state.redis.workers:
        if worker not in alive:
            redis, _ = scripts.dead(b, state.redis, worker)
            lost = state._replace(redis=redis).with_payload(worker, None)
            yield f"DEAD({_name(b, worker)}) with {list(record.on)} on it", lost, False
    if b.ids and b.rules.pinned_go_on:
        redis, freed = scripts.migrate(b, state.redis, beating=alive)
        if freed:
            yield f"MIGRATE: {freed} may go on under another numerics id", state._replace(redis=redis), False
    yield from _gives_up(b, state)
    for request in overdue(state) if b.rules.deadlines_are_kept else ():
        redis, answer = scripts.finish(b, state.redis, request, "expired")
        if answer == "FINISHED":
            yield f"scheduler: {request} is past its deadline", state._replace(redis=redis), False


def _gives_up(b: Bounds, state: State) -> Steps:
    """FINISH of what denies fallbacks and has waited for a GPU for too long; first a scheduler looks, then it acts."""
    for request in state.deciding:
        redis, answer = scripts.finish(b, state.redis, request, "denied", denied=b.rules.giving_up_looks_again)
        record = state.redis.requests[request]
        if answer == "FINISHED" and record is not None and not record.denied:
            ended = redis.requests[request]
            assert ended is not None
            redis = redis.with_request(request, ended._replace(forsaken=True))
        after = state._replace(redis=redis, deciding=tuple(r for r in state.deciding if r != request))
        yield f"scheduler: {request} has waited for a GPU: {answer}", after, False
    for request, record in enumerate(state.redis.requests) if b.rules.denied_are_given_up else ():
        if record is not None and record.state == "queued" and record.denied and request not in state.deciding:
            seen = state._replace(deciding=(*state.deciding, request))
            yield f"scheduler sees that {request} waits for a GPU", seen, False


def _name(b: Bounds, worker: int) -> str:
    return f"worker {worker // LIVES}, stage {b.stage(worker)}"


def _decisions(b: Bounds, state: State) -> Steps:
    """A client cancels; a deadline passes. Both may happen at any moment, also after the end."""
    for request, record in enumerate(state.redis.requests):
        if record is None:
            continue
        if state.budget.cancel:
            yield from _cancels(b, state, request)
        if state.budget.deadline and request not in overdue(state):
            late = state._replace(overdue=(*state.overdue, (request, len(record.log))))
            yield f"the deadline of {request} passes", spend(late, "deadline"), True


def _cancels(b: Bounds, state: State, request: int) -> Steps:
    redis, answer = scripts.finish(b, state.redis, request, "cancelled")
    after, name = spend(state._replace(redis=redis), "cancel"), f"cancel {request}: {answer}"
    wrote = answer == "FINISHED" or b.rules.cancel_writes_again
    record = redis.requests[request]
    assert record is not None
    if not may_tell(b, state, waits=b.rules.cancel_waits, wrote=wrote):
        name += ", and the replicas do not have it"
    elif record.ends == ("cancelled",) and not record.abandoned and request not in state.cancelled:
        after = after._replace(cancelled=(*state.cancelled, request))
    yield name, after, True


def _devices_fail(b: Bounds, state: State) -> Steps:
    """A GPU fails under one run, or under all stages that it has, and begins anew, as a worker does that ends as it was
    told to. What was there is handed over."""
    if state.budget.device and b.gpus:
        after, named = state, list[int]()
        for slot, process in enumerate(state.processes):
            for run in process.table if process.up == "up" and b.is_gpu(process.id) else ():
                moved = rerun(b, state, slot, run.request_id, run.run, "gpu_error", failed=b.stage(process.id))
                yield f"the GPU of worker {slot} fails under {run.request_id}", spend(moved, "device"), True
        for slot, process in enumerate(state.processes):
            if process.up != "up" or not process.ready or not b.is_gpu(process.id):
                continue
            for run in process.table:
                after = rerun(b, after, slot, run.request_id, run.run, "gpu_error", failed=b.stage(process.id))
            after = _begins_anew(b, after, slot)
            named.append(slot)
        if named:
            yield f"the device of workers {named} fails", spend(after, "device"), True
    if state.budget.drain:
        for slot, process in enumerate(state.processes):
            if process.up == "up" and process.ready:
                yield f"worker {slot} drains, or is renewed", spend(_begins_anew(b, state, slot), "drain"), True


def _blocks_move(b: Bounds, state: State) -> Steps:
    """Another plan serves: workers of the first one pass their runs on, one by one, and go, the last stages last."""
    firsts = [p for p in state.processes if b.stage(p.id) == 0 and b.plan(p.id) == 0 and p.up != "gone"]
    for slot, process in enumerate(state.processes):
        if not b.plans or b.plan(process.id) or process.up != "up" or not process.ready:
            continue
        if b.stage(process.id) == 0 and not process.leaving:
            if state.budget.move:
                moving = state.with_process(slot, process._replace(leaving=True))
                yield f"worker {slot} moves on", spend(moving, "move"), True
            continue
        if process.leaving:
            yield from passes_on(b, state, slot)
        if process.leaving or not firsts:
            yield from leaves(b, state, slot)


def _begins_anew(b: Bounds, state: State, slot: int) -> State:
    process = state.processes[slot]
    redis, _ = scripts.dead(b, state.redis, process.id, "drain")
    born = Process(id=next_life(process), ready=False)
    return state._replace(redis=redis).with_process(slot, born).with_payload(process.id, None)


def _processes_fail(state: State) -> Steps:
    for slot, process in enumerate(state.processes):
        if state.budget.kill and process.up not in ("dead", "gone"):
            dead = Process(id=process.id, up="dead", ready=process.ready, told=process.told)
            yield f"kill -9 worker {slot}", spend(state.with_process(slot, dead), "kill"), True
        if state.budget.retire and process.up != "gone":
            gone = Process(id=process.id, up="gone", ready=process.ready)
            yield f"worker {slot} ends for good", spend(state.with_process(slot, gone), "retire"), True
        if state.budget.pause and process.up == "up" and process.ready:
            paused = process._replace(up="paused")
            yield f"worker {slot} freezes", spend(state.with_process(slot, paused), "pause"), True


def _redis_fails(b: Bounds, state: State) -> Steps:
    """Redis dies and comes back without what it wrote behind some moment: any moment, or none. A replica takes its
    place without what it was not sent. It runs out of room."""
    record = state.redis.requests[0]
    early = record is None or len(record.log) < b.lost_from if b.lost_from else False
    if state.budget.restart:
        if state.saved is None and not early:
            yield "from here on nothing reaches the disk of Redis", state._replace(saved=state.redis), True
        elif state.saved is not None:
            yield "kill -9 Redis; it comes back as it was then", spend(_another_redis(state), "restart"), True
    if state.budget.failover:
        if state.saved is None and not early:
            yield "the replicas fall behind", state._replace(saved=state.redis), True
        elif state.saved is not None:
            yield "the replicas catch up", state._replace(saved=None), False
            yield "a failover: a replica goes on as it is", spend(_another_redis(state), "failover"), True
    if state.budget.forget:
        for request in range(len(state.redis.requests)):
            redis, gone = scripts.forget(b, state.redis, request)
            if gone:
                yield f"{request} is forgotten", spend(state._replace(redis=redis), "forget"), True
    if state.budget.wipe:
        yield "the payload Redis loses everything", spend(state._replace(rows=(), stored=()), "wipe"), True


def _another_redis(state: State) -> State:
    assert state.saved is not None
    processes = tuple(p if p.up in ("dead", "gone") else p._replace(fresh=not p.noted) for p in state.processes)
    return state._replace(redis=state.saved, saved=None, processes=processes)


def _calls_go_wrong(b: Bounds, state: State) -> Steps:
    """A worker that works is declared dead (cut off, slow clock); a run that makes progress is re-run as stalled."""
    if state.budget.early_dead:
        for process in state.processes:
            if process.up == "up" and state.redis.worker(process.id) is not None:
                redis, _ = scripts.dead(b, state.redis, process.id)
                lost = state._replace(redis=redis).with_payload(process.id, None)
                yield f"DEAD({_name(b, process.id)}), which lives", spend(lost, "early_dead"), True
    if state.budget.stalled:
        for request, record in enumerate(state.redis.requests):
            if record is not None and record.state == "running":
                redis, _ = scripts.rerun(b, state.redis, request, record.run, "stalled")
                yield f"{request} is re-run as stalled", spend(state._replace(redis=redis), "stalled"), True
