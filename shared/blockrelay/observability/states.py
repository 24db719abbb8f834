"""State machines as metrics: the current state of each, and counts of its transitions."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from blockrelay.state_machine import StateMachine


class States(Collector):
    """Exports the state and the transition counts of every state machine given to `show`, read at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._machines: dict[str, StateMachine[Any, Any]] = {}
        registry.register(self)

    def show(self, machine: StateMachine[Any, Any]) -> None:
        """Exports `machine` in place of an earlier one of the same name. Its counts begin at 0, as after a restart."""
        self._machines[machine.table.name] = machine

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        now = GaugeMetricFamily(
            "blockrelay_state", "1 if a state machine is in this state, else 0", labels=["machine", "state"]
        )
        changes = CounterMetricFamily(
            "blockrelay_state_transitions",
            "Changes of a state machine from one state to another, by the event that caused them",
            labels=["machine", "from", "event", "to"],
        )
        for name, machine in list(self._machines.items()):
            for state in machine.table.states:
                now.add_metric([name, state], float(machine.state == state))
            for (before, event), after in machine.table.transitions.items():
                changes.add_metric([name, before, event, after], machine.counts[before, event])
        yield now
        yield changes
