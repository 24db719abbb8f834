"""The state machine of a scheduler process, as a table of transitions."""

from typing import Literal

from blockrelay.state_machine import StateMachine, StateTable

SchedulerState = Literal["registering", "idle", "scheduling", "waiting", "error"]
SchedulerEvent = Literal["joined", "round_begins", "published", "workers_missing", "redis_trouble"]
#: registering: it looks for its Redis and cell. scheduling: a round runs. idle: no round has run yet, or in the last
#: one every stage of the plan had a worker. waiting: in the last round a stage had none. error: Redis failed.
SCHEDULER: StateTable[SchedulerState, SchedulerEvent] = StateTable(
    name="scheduler",
    start="registering",
    transitions={
        ("registering", "joined"): "idle",
        ("registering", "round_begins"): "scheduling",
        ("registering", "redis_trouble"): "error",
        ("error", "joined"): "idle",
        ("error", "round_begins"): "scheduling",
        ("idle", "round_begins"): "scheduling",
        ("waiting", "round_begins"): "scheduling",
        ("scheduling", "published"): "idle",
        ("scheduling", "workers_missing"): "waiting",
        ("scheduling", "redis_trouble"): "error",
    },
    frequent=frozenset({"round_begins", "published", "workers_missing"}),
)
SchedulerMachine = StateMachine[SchedulerState, SchedulerEvent]
