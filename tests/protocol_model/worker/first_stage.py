"""The first stage: takes jobs, learns tokens, sends rows on."""

from itertools import product

from tests.protocol_model import scripts
from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import NextJob, Process, Redis, Run, Segment, State
from tests.protocol_model.worker import handover
from tests.protocol_model.worker.table import Steps, beating, find, overdue, pages, put, rerun


def claims(b: Bounds, state: State, slot: int, me: Process) -> Steps:
    most = b.room - len(me.table)
    if most <= 0 or me.leaving:
        return
    if not b.rules.claim_is_atomic:
        yield from _claims_in_two(b, state, slot, me)
        return
    seen: list[Redis] = [state.redis]
    latest_too = (False, True) if b.either_worker and b.stages > 1 and b.workers > 1 else (False,)
    for latest, spill in product(latest_too, range(-1, b.requests if b.spills else 0)):
        redis, claimed = scripts.claim(
            b, state.redis, me.id, most, range(state.nonce, state.nonce + most),
            beating=beating(state), free=_claimable(b.pool(me.id), me.table), overdue=overdue(state), latest=latest,
            spill=spill,
        )  # fmt: skip
        if redis in seen:
            continue
        seen.append(redis)
        passed = _passed(state, redis, claimed)
        lost = state._replace(redis=redis, nonce=state.nonce + len(claimed), passed=passed)
        table = me.table
        for job in claimed:
            table = put(table, _new_run(b, lost, me.id, job))
        after = lost.with_process(slot, me._replace(table=table))
        if any(c.quarantined for c in claimed):  # what CLAIM named has arrived unharmed
            after = after._replace(redis=scripts.name(after.redis, me.id, None))
        names = " ".join(f"{c.request} as run {c.run}" for c in claimed)
        yield f"worker {slot} claims {names}", after, False
        if claimed and state.budget.lost_reply:
            spent = state.budget._replace(lost_reply=state.budget.lost_reply - 1)
            yield f"worker {slot} claims {names}, reply lost", lost._replace(budget=spent), True


def _claimable(pool: int, table: tuple[Run, ...]) -> int:
    """Free pages beside those that the runs here need for known tokens and the next, and one more for each."""
    return max(0, pool - pages(table) - sum(max(0, r.known + 1 - r.computed) + 1 for r in table))


def _passed(state: State, redis: Redis, claimed: list[scripts.Claimed]) -> tuple[int, ...]:
    """Fairness is watched here: who waits sees every first run of another tenant go by."""
    if not state.passed:
        return ()
    before = {r for _, r in state.redis.queue}
    firsts = [state.redis.requests[c.request] for c in claimed if c.request in before]
    waiting = {record.tenant for _, r in redis.queue if (record := redis.requests[r]) is not None}
    return tuple(
        count + sum(r is not None and r.tenant != tenant for r in firsts) if tenant in waiting else 0
        for tenant, count in enumerate(state.passed)
    )


def _new_run(b: Bounds, state: State, worker: int, job: scripts.Claimed) -> Run:
    run = Run(
        job.request, job.run, job.route, b.prompt + job.committed, committed=job.committed, quarantined=job.quarantined
    )
    record = state.redis.requests[job.request]
    if not b.handover or record is None:
        return run
    run = handover.begins(b, run._replace(tokens=record.log, private=job.private), worker)
    return handover.adopted(b, state, run, worker, handover.reusable(run, job.reusable))


def _claims_in_two(b: Bounds, state: State, slot: int, me: Process) -> Steps:
    """Without the rule: the job is deleted first, run and route are written later."""
    nonces = range(state.nonce, state.nonce + 1)
    if me.written < 0:
        redis, claimed = scripts.claim(b, state.redis, me.id, 1, nonces, beating=beating(state), free=b.pool(me.id))
        if claimed:
            taken = claimed[0].request
            redis = scripts.unqueue(b, state.redis, taken)
            after = state._replace(redis=redis).with_process(slot, me._replace(written=taken))
            yield f"worker {slot} takes job {taken}", after, False
        return
    record = state.redis.requests[me.written]
    assert record is not None
    back = state.redis._replace(reruns=(me.written,))
    redis, claimed = scripts.claim(b, back, me.id, 1, nonces, beating=beating(state), free=b.pool(me.id))
    if claimed and record.state == "queued":
        after = state._replace(redis=redis, nonce=state.nonce + 1)
        written = me._replace(written=-1, table=put(me.table, _new_run(b, after, me.id, claimed[0])))
        yield f"worker {slot} writes its route", after.with_process(slot, written), False


def next_jobs(b: Bounds, state: State, slot: int, me: Process) -> Steps:
    """Tokens of a run here became known: by COMMIT (control inbox) or a little earlier (payload inbox)."""
    record = state.redis.worker(me.id)
    if record is not None and record.inbox:
        redis = scripts.take(state.redis, me.id)
        yield from _learns(b, state._replace(redis=redis), slot, me, record.inbox[0])
    early = state.payload(me.id)
    if early:
        assert isinstance(early[0], NextJob)
        yield from _learns(b, state.with_payload(me.id, early[1:]), slot, me, early[0])


def _learns(b: Bounds, state: State, slot: int, me: Process, job: NextJob) -> Steps:
    run = find(me.table, job.request, job.run)
    name = f"worker {slot} reads next job {job.request}@{job.position} of run {job.run}"
    if run is None:
        yield f"{name}: unknown", state, False
        return
    known = run.known - b.prompt
    if job.position > known:
        yield f"{name}: a hole", rerun(b, state, slot, job.request, job.run, "missing_pages"), False
        return
    new = run._replace(known=max(run.known, b.prompt + job.position + len(job.tokens)))
    if b.handover:
        new = new._replace(tokens=(*run.tokens, *job.tokens[known - job.position :]))
    yield name, state.with_process(slot, me._replace(table=put(me.table, new))), False


def forwards(b: Bounds, state: State, slot: int, me: Process) -> Steps:
    """Rows to the next stage: a prompt in two pieces, then token by token."""
    for run in me.table:
        if run.computed >= run.known:
            continue
        end = run.known - 1 if run.known - run.computed > 1 else run.known
        if pages(me.table) + end - run.computed > b.pool(me.id):
            continue  # waits for pages
        sent = run._replace(computed=end, sequence=run.sequence + 1)
        for stored, after in handover.stores(b, state, sent, me.id, run.computed):
            yield from _forwards(b, after, slot, me, run, sent, stored)


def _forwards(b: Bounds, state: State, slot: int, me: Process, run: Run, sent: Run, stored: str) -> Steps:
    """The rows between what is computed of `run` and of `sent`."""
    target, end = run.route[1], sent.computed
    segment = Segment(run.request_id, run.run, run.sequence, run.computed, end, end == run.known)
    if b.handover:
        segment = segment._replace(tokens=run.tokens[: max(0, end - b.prompt)], varied=run.varied)
    after = state.with_process(slot, me._replace(table=put(me.table, sent)))
    name = f"worker {slot} forwards {run.request_id}[{segment.first}:{end}] of run {run.run}{stored}"
    inbox = state.payload(target)
    if inbox is None:
        yield f"{name}: no inbox", rerun(b, after, slot, run.request_id, run.run, "no_inbox"), False
        return
    delivered = after.with_payload(target, (*inbox, segment))
    yield name, delivered, False
    if state.budget.duplicate:
        spent = state.budget._replace(duplicate=state.budget.duplicate - 1)
        twice = after.with_payload(target, (*inbox, segment, segment))
        yield f"{name} twice", twice._replace(budget=spent), True
    if state.budget.lost_reply:
        spent = state.budget._replace(lost_reply=state.budget.lost_reply - 1)
        lost = rerun(b, delivered._replace(budget=spent), slot, run.request_id, run.run, "no_inbox")
        yield f"{name}, reply lost", lost, True
