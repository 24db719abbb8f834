"""State machines as a test finds them."""

from blockrelay_worker.states import WORKER, WorkerMachine


def idle_machine() -> WorkerMachine:
    """A worker's that has loaded its stage."""
    machine = WorkerMachine(WORKER)
    machine.on("assigned")
    machine.on("loaded")
    return machine
