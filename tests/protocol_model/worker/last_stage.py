"""The last of several stages: takes rows in sequence and samples."""

from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Commit, NextJob, Process, Record, Run, Segment, State
from tests.protocol_model.worker import handover
from tests.protocol_model.worker.table import Steps, find, pages, put, rerun


def receives(b: Bounds, state: State, slot: int, me: Process) -> Steps:
    inbox = state.payload(me.id)
    if not inbox:
        return
    segment = inbox[0]
    assert isinstance(segment, Segment)
    state = state.with_payload(me.id, inbox[1:])
    name = f"worker {slot} receives {segment.request}[{segment.first}:{segment.end}] of run {segment.run}"
    run = find(me.table, segment.request, segment.run)
    record = state.redis.requests[segment.request]
    current = record is not None and record.run == segment.run
    if run is None:
        if segment.sequence != 0 and b.rules.sequence_is_checked:
            if current:
                yield f"{name}: a hole", rerun(b, state, slot, segment.request, segment.run, "missing_pages"), False
            else:
                yield f"{name}: foreign", state, False
            return
        if (not current and b.rules.foreign_runs_are_dropped) or record is None:
            yield f"{name}: foreign", state, False
            return
        if len(me.table) >= b.room and not any(r.request_id == segment.request for r in me.table):
            yield f"{name}: no room", rerun(b, state, slot, segment.request, segment.run, "missing_pages"), False
            return
        run = _first_sight(b, state, me.id, segment, record)
    if run.ended or (b.rules.sequence_is_checked and segment.sequence < run.sequence):
        yield f"{name}: seen before", state, False
        return
    table = put(me.table, run)
    if segment.first > run.computed or (b.rules.sequence_is_checked and segment.sequence > run.sequence):
        lacked = run.computed if b.handover and segment.sequence == 0 and segment.first > run.computed else -1
        again = rerun(b, state, slot, segment.request, segment.run, "missing_pages", found=lacked)
        yield f"{name}: a hole", again, False
        return
    if pages(table) - run.computed + segment.end > b.pool(me.id):
        return  # waits until runs that have ended, or gave way, are forgotten here
    before = run.computed
    run = run._replace(computed=segment.end, sequence=run.sequence + 1)
    if b.handover:
        run = handover.receives(run, segment)
    for stored, after in handover.stores(b, state, run, me.id, before):
        if not segment.samples:
            yield f"{name}{stored}", after.with_process(slot, me._replace(table=put(table, run))), False
            continue
        for now, item in handover.chosen(b, *sample(b, run, segment.end)):
            new = me._replace(table=put(table, now), pending=(*me.pending, item))
            sampled = after.with_process(slot, new)
            if b.announce and not item.end and (first := after.payload(run.route[0])) is not None:
                early = NextJob(item.request, item.run, item.position, item.tokens)
                sampled = sampled.with_payload(run.route[0], (*first, early))
            yield f"{name}, samples {item.tokens}{stored}", sampled, False


def _first_sight(b: Bounds, state: State, worker: int, segment: Segment, record: Record) -> Run:
    """As record and log say it; what the stage before has found must be there too."""
    run = Run(segment.request, segment.run, record.route, 0, committed=len(record.log))
    if b.handover:
        run = run._replace(tokens=record.log, known=b.prompt + len(record.log), private=record.private)
        run = handover.begins(b, run, worker)
        if 0 < segment.first <= handover.reusable(run, -1):
            run = handover.adopted(b, state, run, worker, segment.first)
        run = run._replace(known=0)
    return run


def sample(b: Bounds, run: Run, units: int) -> tuple[Run, Commit]:
    """The token after `units` known ones. It depends on them alone; where it belongs is what the run has committed."""
    if b.sessions:
        return run._replace(ended=True), Commit(run.request_id, run.run, 0, (), "tensor")
    token = units - b.prompt + 1
    end = "length" if token >= b.tokens else ""
    item = Commit(run.request_id, run.run, run.committed, (token,), end)
    return run._replace(committed=run.committed + 1, ended=bool(end)), item
