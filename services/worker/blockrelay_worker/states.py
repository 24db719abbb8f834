"""State tables: the states of a worker, and those of its engine within one step."""

from collections.abc import Mapping
from typing import Literal

from blockrelay.errors import DeviceCode, DeviceFailed, DeviceLost, ExecutionError
from blockrelay.state_machine import StateMachine, StateTable

WorkerState = Literal["registering", "loading", "idle", "computing", "waiting", "draining", "error"]
WorkerEvent = Literal[
    "assigned",
    "forgotten",
    "device_lost",
    "memory_lacks",
    "loaded",
    "failed",
    "recovered",
    "rows_ready",
    "rows_missing",
    "runs_ended",
    "drain",
    "gone",
]
#: idle: the worker has no request. waiting: it has requests, but none with tokens to compute. `lifecycle.service`
#: reports the events until `loaded` and after the drain, the engine's loop and its steps those between.
WORKER: StateTable[WorkerState, WorkerEvent] = StateTable(
    name="worker",
    start="registering",
    transitions={
        ("registering", "assigned"): "loading",
        ("loading", "loaded"): "idle",
        ("loading", "forgotten"): "registering",
        ("loading", "device_lost"): "registering",
        ("loading", "memory_lacks"): "registering",
        ("loading", "failed"): "error",
        ("idle", "rows_ready"): "computing",
        ("idle", "rows_missing"): "waiting",
        ("computing", "rows_missing"): "waiting",
        ("computing", "runs_ended"): "idle",
        ("computing", "failed"): "error",
        ("waiting", "rows_ready"): "computing",
        ("waiting", "runs_ended"): "idle",
        ("error", "recovered"): "computing",
        ("idle", "drain"): "draining",
        ("computing", "drain"): "draining",
        ("waiting", "drain"): "draining",
        ("error", "drain"): "draining",
        ("draining", "failed"): "draining",
        ("draining", "recovered"): "draining",
        ("draining", "gone"): "registering",
    },
    frequent=frozenset({"rows_ready", "rows_missing", "runs_ended"}),
)
WorkerMachine = StateMachine[WorkerState, WorkerEvent]

EngineState = Literal["Idle", "Scheduling", "WaitingWorker", "Error"]
EngineEvent = Literal["batch_ready", "dispatch_ok", "worker_done", "timeout", "oom", "internal", "rollback_done"]
#: The states of the engine during one batch; `engine.step` does what the state asks. Idle takes the next batch,
#: Scheduling builds it, WaitingWorker has it computed and passes the results on, Error decides what follows a failure:
#: each request of the batch is queued again, has ended, or will be computed alone or in a smaller batch.
ENGINE: StateTable[EngineState, EngineEvent] = StateTable(
    name="engine",
    start="Idle",
    transitions={
        ("Idle", "batch_ready"): "Scheduling",
        ("Scheduling", "dispatch_ok"): "WaitingWorker",
        ("Scheduling", "internal"): "Error",
        ("WaitingWorker", "worker_done"): "Idle",
        ("WaitingWorker", "timeout"): "Error",
        ("WaitingWorker", "oom"): "Error",
        ("WaitingWorker", "internal"): "Error",
        ("Error", "rollback_done"): "Idle",
    },
    frequent=frozenset({"batch_ready", "dispatch_ok", "worker_done"}),
)
EngineMachine = StateMachine[EngineState, EngineEvent]


_EVENTS: Mapping[DeviceCode, Literal["timeout", "oom", "internal"]] = {
    "TIMEOUT": "timeout",
    "OOM": "oom",
    "INTERNAL": "internal",
}


def failure_event(error: ExecutionError) -> Literal["timeout", "oom", "internal"]:
    """Returns the event for a failed step: the code of a device's error, or the kind of the error's cause."""
    if isinstance(error, DeviceFailed | DeviceLost):
        return _EVENTS[error.code]
    match error.__cause__:
        case MemoryError():
            return "oom"
        case TimeoutError():
            return "timeout"
        case _:
            return "internal"
