"""Every pair of state and event: what the table has happens, and nothing else does."""

import itertools
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from blockrelay.errors import ExecutionError, IllegalTransition
from blockrelay.observability.states import States
from blockrelay.state_machine import StateMachine, StateTable
from blockrelay_scheduler.states import SCHEDULER
from blockrelay_worker.states import ENGINE, WORKER, failure_event

TABLES: list[StateTable[Any, Any]] = [ENGINE, WORKER, SCHEDULER]
PAIRS = [(table, *pair) for table in TABLES for pair in itertools.product(table.states, table.events)]


@pytest.mark.parametrize(("table", "state", "event"), PAIRS, ids=lambda part: getattr(part, "name", part))
def test_a_pair_of_the_table_happens_and_any_other_is_an_error_that_changes_nothing(
    table: StateTable[Any, Any], state: str, event: str
) -> None:
    machine = StateMachine(table)
    machine.state = state
    if (state, event) in table.transitions:
        machine.on(event)
        assert machine.state == table.transitions[state, event]
        assert machine.counts == {(state, event): 1}
    else:
        with pytest.raises(IllegalTransition, match=f"{table.name}: '{event}' cannot happen in state '{state}'"):
            machine.on(event)
        assert machine.state == state
        assert not machine.counts


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_state_can_be_reached_and_left(table: StateTable[Any, Any]) -> None:
    reached = {table.start}
    while more := {to for (state, _), to in table.transitions.items() if state in reached} - reached:
        reached |= more
    assert reached == set(table.states)
    assert {state for state, _ in table.transitions} == set(table.states)
    assert table.frequent <= set(table.events)


def test_the_engine_s_table_is_the_one_that_was_asked_for() -> None:
    assert ENGINE.start == "Idle"
    assert {k: v for k, v in ENGINE.transitions.items() if k[1] != "internal"} == {
        ("Idle", "batch_ready"): "Scheduling",
        ("Scheduling", "dispatch_ok"): "WaitingWorker",
        ("WaitingWorker", "worker_done"): "Idle",
        ("WaitingWorker", "timeout"): "Error",
        ("WaitingWorker", "oom"): "Error",
        ("Error", "rollback_done"): "Idle",
    }


def test_states_and_changes_are_metrics() -> None:
    registry = CollectorRegistry()
    states, machine = States(registry), StateMachine(ENGINE)
    states.show(machine)
    for event in ("batch_ready", "dispatch_ok", "oom"):
        machine.on(event)

    def state(name: str) -> float | None:
        return registry.get_sample_value("blockrelay_state", {"machine": "engine", "state": name})

    assert [state(name) for name in ENGINE.states] == [0, 0, 0, 1]
    change = {"machine": "engine", "from": "WaitingWorker", "event": "oom", "to": "Error"}
    assert registry.get_sample_value("blockrelay_state_transitions_total", change) == 1


@pytest.mark.parametrize(
    ("cause", "event"),
    [(MemoryError(), "oom"), (TimeoutError(), "timeout"), (RuntimeError(), "internal"), (None, "internal")],
)
def test_a_failure_is_told_by_its_cause(cause: Exception | None, event: str) -> None:
    error = ExecutionError("block_1 failed")
    error.__cause__ = cause
    assert failure_event(error) == event
