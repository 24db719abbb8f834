"""How a worker leaves for good: it passes its runs on, one by one, and ends its registration when none is left."""

from tests.protocol_model import scripts
from tests.protocol_model.bounds import Bounds
from tests.protocol_model.data import Process, State
from tests.protocol_model.worker.table import Steps, rerun


def passes_on(b: Bounds, state: State, slot: int) -> Steps:
    for run in state.processes[slot].table:
        passed_on = rerun(b, state, slot, run.request_id, run.run, "drain")
        yield f"worker {slot} passes {run.request_id} on", passed_on, False


def leaves(b: Bounds, state: State, slot: int) -> Steps:
    """If no run is here, and none on its way."""
    process = state.processes[slot]
    there = state.redis.worker(process.id)
    if process.table or (there is not None and there.on):
        return
    redis, _ = scripts.dead(b, state.redis, process.id, "drain")
    gone = Process(id=process.id, up="gone", ready=process.ready)
    left = state._replace(redis=redis).with_process(slot, gone).with_payload(process.id, None)
    yield f"worker {slot} leaves", left, False
