"""Workers change to another precision: the plan gives them another block folder, and with it another numerics id.

Those of numerics id 0 retire, and go when no request needs them any more; workers of id 1 serve in their places.
"""

from tests.protocol_model import scripts
from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import LIVES, Process, State
from tests.protocol_model.worker.departure import leaves, passes_on
from tests.protocol_model.worker.table import Steps, beating, spend


def steps(b: Bounds, state: State) -> Steps:
    if not b.faults.change:
        return
    for slot, process in enumerate(state.processes):
        if b.numerics(process.id) or process.up in ("gone", "paused") or not (process.told or process.up == "up"):
            continue
        if process.told and process.up == "dead":
            yield f"worker {slot} ends, and its place is another one's", _gone(b, state, slot), False
        elif not process.ready:
            continue
        elif process.leaving:
            if b.stage(process.id) == 0:
                yield from passes_on(b, state, slot)
            for name, left, fault in leaves(b, state, slot):
                yield name, _gone(b, left, slot), fault
        elif process.told:
            yield from _retires(b, state, slot, process)
        else:
            yield from _stays(b, state, slot, process)


def _stays(b: Bounds, state: State, slot: int, process: Process) -> Steps:
    there = state.redis.worker(process.id)
    if there is not None and there.retires and b.rules.staying_is_said_again:
        redis = scripts.stay(state.redis, process.id)
        yield f"worker {slot} takes new requests again", state._replace(redis=redis), False
    if state.budget.change:
        told = state.with_process(slot, process._replace(told=True))
        if b.alone:  # those of all stages: no route has two numerics ids
            told = state._replace(processes=tuple(p._replace(told=not b.numerics(p.id)) for p in state.processes))
        yield f"the plan gives worker {slot} another precision", spend(told, "change"), True


def _retires(b: Bounds, state: State, slot: int, process: Process) -> Steps:
    """Until it has begun to leave, the plan may take that back. Between its look and its leave it claims as before."""
    if state.budget.call_off:
        back = state.with_process(slot, process._replace(told=False, going=False))
        if not b.rules.staying_is_said_again:  # but once, when it learns of it
            back = back._replace(redis=scripts.stay(back.redis, process.id))
        yield f"the plan gives worker {slot} its precision back", spend(back, "call_off"), True
    if process.going:
        leaving = state.with_process(slot, process._replace(going=False, leaving=True))
        yield f"worker {slot} begins to leave", leaving, False
        return
    told = tuple(one.id for one in state.processes if one.told)
    redis, may_go = scripts.look(b, state.redis, process.id, told=told, beating=beating(state))
    if may_go:
        going = state._replace(redis=redis).with_process(slot, process._replace(going=True))
        yield f"worker {slot} finds that it may go", going, False
    elif redis != state.redis:
        yield f"worker {slot} retires", state._replace(redis=redis), False


def _gone(b: Bounds, state: State, slot: int) -> State:
    """The process serves another folder from now on, which may be the first one in its place."""
    process = state.processes[slot]
    state = state.with_process(slot, Process(id=process.id, up="gone", ready=process.ready))
    if not b.alone:
        return state
    return state.with_process(slot + 1, Process(id=(slot + 1) * LIVES, up="dead", ready=False))
