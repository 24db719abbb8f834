"""State machines as metrics: where each stands, and how often it changed."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from blockrelay.state_machine import StateMachine


class States(Collector):
    """The machines that it was told of, read when somebody scrapes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._machines: dict[str, StateMachine[Any, Any]] = {}
        registry.register(self)

    def show(self, machine: StateMachine[Any, Any]) -> None:
        """From now on instead of an earlier one of the same name: its counts begin anew, as those of a new process."""
        self._machines[machine.table.name] = machine

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        now = GaugeMetricFamily(
            "blockrelay_state", "Whether a state machine is in this state (1) or not (0)", labels=["machine", "state"]
        )
        changes = CounterMetricFamily(
            "blockrelay_state_transitions",
            "How often a state machine changed its state",
            labels=["machine", "from", "event", "to"],
        )
        for name, machine in list(self._machines.items()):
            for state in machine.table.states:
                now.add_metric([name, state], float(machine.state == state))
            for (before, event), after in machine.table.transitions.items():
                changes.add_metric([name, before, event, after], machine.counts[before, event])
        yield now
        yield changes
