"""docs/states.md, from the tables of the state machines and the list of failure points."""

from typing import Any

from blockrelay.state_machine import StateTable
from blockrelay_scheduler.states import SCHEDULER
from blockrelay_worker.states import ENGINE, WORKER
from docs.generate.failure_points import points
from docs.generate.tables import table

_HEAD = """\
# States and failure points

For developers, and for operators who read `STATE_CHANGED` in a log or want to see a failure happen.

What a worker, its engine and a scheduler are doing is a state, and every change of it is a line of a table. One
function makes the changes (`blockrelay.state_machine`): an event that is not in the table is an error that ends the
process, and a test tries all pairs of states and events.

`GET /metrics` of a worker and of a scheduler says where each machine stands (`blockrelay_state`) and how often each
change happened (`blockrelay_state_transitions_total`). Each is logged as `STATE_CHANGED`, at level `INFO`, or `DEBUG`
where it happens many times a second.
"""
_MACHINES: tuple[tuple[StateTable[Any, Any], str], ...] = (
    (
        WORKER,
        "It is registering until a plan names it, and loads the blocks of its stage. It is idle without requests, "
        "computing, or waiting: requests are here, and none has rows that could be computed now (another stage has "
        "them, or their pages are read). In error a batch has failed and its requests are being put back. A worker "
        "that was told to end, or was declared dead, drains.",
    ),
    (
        ENGINE,
        "One batch. The state decides what the engine does next, and what happens then decides the next state. Idle: "
        "take the batch. Scheduling: build it. WaitingWorker: have the executor compute it, and pass the results on. "
        "Error, after `oom`, `timeout`, or anything else (`internal`): queue every request of the batch again, end it, "
        "or compute it alone next.",
    ),
    (
        SCHEDULER,
        "It is registering until it has found its Redis and a cell of its protocol. Each round begins with scheduling "
        "and ends idle, or waiting while a stage of the plan has no worker. In error it waits for Redis.",
    ),
)


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(_part(machine, text) for machine, text in _MACHINES) + points()


def _part(machine: StateTable[Any, Any], text: str) -> str:
    rows = [
        (f"`{before}`", f"`{event}`", f"`{after}`", "DEBUG" if event in machine.frequent else "INFO")
        for (before, event), after in machine.transitions.items()
    ]
    name = machine.name.capitalize()
    return f"\n## {name}\n\n{text} It begins `{machine.start}`.\n\n{table(('from', 'event', 'to', 'logged'), rows)}"
