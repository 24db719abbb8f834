"""One worker process: its lives, its beat and its commits, as steps between which anything else may happen."""

from tests.protocol_model import scripts
from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Commit, Process, State
from tests.protocol_model.worker import first_stage, last_stage, whole_model
from tests.protocol_model.worker.table import Steps, dropped, find, next_life, overdue, rerun


def steps(b: Bounds, state: State, slot: int) -> Steps:
    me = state.processes[slot]
    if me.up == "gone" or (me.up == "dead" and me.told):
        return
    if me.up == "dead":
        born = Process(id=next_life(me), ready=False, noted=b.rules.identity_is_noted_first)
        yield f"worker {slot} starts", state.with_process(slot, born), False
    elif me.up == "paused":
        yield f"worker {slot} wakes", state.with_process(slot, me._replace(up="up")), False
    elif not me.ready:
        redis = scripts.announce(state.redis, me.id, b.pool(me.id))
        ready = state._replace(redis=redis).with_process(slot, me._replace(ready=True)).with_payload(me.id, ())
        yield f"worker {slot} announces itself", ready, False
    else:
        yield from _beats(b, state, slot, me)
        yield from _commits(b, state, slot, me)
        if b.stage(me.id) == 0:
            yield from first_stage.claims(b, state, slot, me)
            yield from first_stage.next_jobs(b, state, slot, me)
            if b.stages == 1:
                yield from whole_model.computes(b, state, slot, me)
            else:
                yield from first_stage.forwards(b, state, slot, me)
        else:
            yield from last_stage.receives(b, state, slot, me)


# --- the beat ---


def _beats(b: Bounds, state: State, slot: int, me: Process) -> Steps:
    redis, there = scripts.beat(b, state.redis, me.id)
    after = state._replace(redis=redis)
    rules = b.rules
    if not me.noted:
        yield f"worker {slot} notes which Redis it is", after.with_process(slot, me._replace(noted=True)), False
    if not me.fresh:
        yield from _after_restart(b, after, slot, me, there)
    if there is None or state.payload(me.id) is None:
        if rules.gone_worker_forgets:
            redis, _ = scripts.dead(b, redis, me.id, "drain")
            born = Process(
                id=next_life(me), up="dead" if me.told else "up", ready=False, noted=b.rules.identity_is_noted_first,
                told=me.told,
            )  # fmt: skip
            gone = after._replace(redis=redis).with_process(slot, born).with_payload(me.id, None)
            yield f"worker {slot} finds itself gone and begins a new life", gone, False
        return
    if redis != state.redis:
        yield f"worker {slot} beats: delayed re-runs are due", after, False
    for run in me.table:
        if rules.foreign_runs_are_dropped and there.get(run.request_id) != run.run:
            table = dropped(me.table, run.request_id, run.run)
            forgotten = after.with_process(slot, me._replace(table=table))
            yield f"worker {slot} drops run {run.run}: not on it", forgotten, False
    if b.stage(me.id) == 0 and rules.beat_finds_orphans:
        for request, run in there.items():
            if run and find(me.table, request, run) is None:
                orphan = rerun(b, after, slot, request, run, "forgotten")
                yield f"worker {slot} finds the orphan {request}", orphan, False


def _after_restart(b: Bounds, state: State, slot: int, me: Process, there: dict[int, int] | None) -> Steps:
    """Another Redis process: forget all runs, re-run whatever it believes is here."""
    if not b.rules.restart_forgets_and_reruns:
        yield f"worker {slot} overlooks the restart", state.with_process(slot, me._replace(fresh=True)), False
        return
    redis = state.redis
    for request, run in (there or {}).items():
        if run:
            redis, _ = scripts.rerun(b, redis, request, run, "restart")
    state = state._replace(redis=redis).with_process(slot, me._replace(fresh=True, table=()))
    yield f"worker {slot} notices the restart", state, False


# --- commits ---


def _commits(b: Bounds, state: State, slot: int, me: Process) -> Steps:
    """One COMMIT with everything since the last; its reply may be lost, then it is sent again."""
    if not me.pending:
        return
    redis, answers = scripts.commit(b, state.redis, me.pending, overdue=overdue(state))
    table, reruns = me.table, list[Commit]()
    for item, (verdict, _) in zip(me.pending, answers, strict=True):
        if verdict in ("GAP", "DIVERGED"):
            reruns.append(item)
        if verdict != "OK" or item.end:
            table = dropped(table, item.request, item.run)
    after = state._replace(redis=redis).with_process(slot, me._replace(table=table, pending=()))
    for item in reruns:
        after = rerun(b, after, slot, item.request, item.run, "restart")
    what = " ".join(f"{i.request}@{i.position}:{v}" for i, (v, _) in zip(me.pending, answers, strict=True))
    yield f"worker {slot} commits {what}", after, False
    if state.budget.lost_reply:
        spent = state.budget._replace(lost_reply=state.budget.lost_reply - 1)
        yield f"worker {slot} commits {what}, reply lost", state._replace(redis=redis, budget=spent), True
