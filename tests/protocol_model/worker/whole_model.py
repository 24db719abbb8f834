"""A worker of the whole model: computes and samples batches, promises more pages than it has, tries suspects alone."""

from tests.protocol_model import scripts
from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Process, Run, State
from tests.protocol_model.worker import handover
from tests.protocol_model.worker.last_stage import sample
from tests.protocol_model.worker.table import Steps, find, pages, put


def computes(b: Bounds, state: State, slot: int, me: Process) -> Steps:
    """One iteration over all runs with rows to compute. A suspect is named first, and computed alone.

    One step per batch that the choice of rows may make: each suspect for itself, all others together.
    """
    ready = [r for r in me.table if not r.ended]
    if me.quarantine >= 0:
        run = next((r for r in ready if r.request_id == me.quarantine), None)
        if run is not None:
            yield from _computes(b, state, slot, me, [run])
        if not me.pending:
            over = state._replace(redis=scripts.name(state.redis, me.id, None))
            yield f"worker {slot} has tried {me.quarantine}", over.with_process(slot, me._replace(quarantine=-1)), False
        return
    suspects = [r for r in ready if r.quarantined and b.rules.suspects_run_alone]
    for run in suspects:
        named = state._replace(redis=scripts.name(state.redis, me.id, run.request_id))
        named = named.with_process(slot, me._replace(quarantine=run.request_id))
        yield f"worker {slot} tries {run.request_id} alone", named, False
    together = [r for r in ready if r not in suspects]
    if together:
        yield from _computes(b, state, slot, me, together)


def _computes(b: Bounds, state: State, slot: int, me: Process, batch: list[Run]) -> Steps:
    names = " ".join(str(r.request_id) for r in batch)
    if any(r.request_id in b.poison for r in batch):
        died = Process(id=me.id, up="dead")
        yield f"worker {slot} dies of {names}", state.with_process(slot, died), False
        return
    if b.handover:
        yield from _computes_one(b, state, slot, me, batch[0])
        return
    table, pending = me.table, me.pending
    for run in batch:
        current = find(table, run.request_id, run.run)
        if current is None or current.computed != run.computed:
            continue  # preempted in this very round
        table, room = _make_room(b, b.pool(me.id), table, current)
        if room:
            current, item = sample(b, current._replace(computed=current.known), current.known)
            table = put(table, current._replace(known=current.known + 1))
            pending = (*pending, item)
    if pending != me.pending:
        after = me._replace(table=table, pending=pending)
        yield f"worker {slot} computes {names}", state.with_process(slot, after), False


def _computes_one(b: Bounds, state: State, slot: int, me: Process, run: Run) -> Steps:
    """The oldest run, whose pages may be stored, and whose token is anybody's guess where the device varies."""
    computed = run._replace(computed=run.known)
    for stored, after in handover.stores(b, state, computed, me.id, run.computed):
        for now, item in handover.chosen(b, *sample(b, computed, computed.known)):
            now = now._replace(known=now.known + 1, tokens=(*now.tokens, *item.tokens))
            new = me._replace(table=put(me.table, now), pending=(*me.pending, item))
            yield (
                f"worker {slot} computes {run.request_id}: {item.tokens}{stored}",
                after.with_process(slot, new),
                False,
            )


def _make_room(b: Bounds, pool: int, table: tuple[Run, ...], run: Run) -> tuple[tuple[Run, ...], bool]:
    """Pages for all known tokens of `run`, taken from younger runs where there are too few."""
    while pages(table) + run.known - run.computed > pool:
        younger = table[[r.request_id for r in table].index(run.request_id) + 1 :]
        victim = next((r for r in reversed(younger) if r.computed), None)
        if victim is None or not b.rules.youngest_is_preempted:
            return table, False
        table = put(table, victim._replace(computed=0))
    return table, True
