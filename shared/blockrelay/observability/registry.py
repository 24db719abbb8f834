"""The metrics registry of a service, with the metrics that every service has: process, Python and build."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, GCCollector, Info, Metric, PlatformCollector, ProcessCollector
from prometheus_client.metrics import disable_created_metrics

from blockrelay import __version__
from blockrelay.protocol.number import PROTOCOL

_OURS = "blockrelay_"


class ServiceRegistry(CollectorRegistry):
    """A registry that adds the same labels to every series whose name begins with `blockrelay_`."""

    def __init__(self, labels: dict[str, str]) -> None:
        """`labels`: names and values, added to the labels that a series has. A series' own label of that name wins."""
        super().__init__()
        self._labels, self._facts = labels, dict[str, str]()
        self._build = Info(
            "blockrelay_build", "The release of this service and the protocol that it speaks", registry=self
        )

    def tell_build(self, **facts: str) -> None:
        """Adds `facts` to the labels of `blockrelay_build_info`."""
        self._facts |= facts
        self._build.info(self._facts)

    def collect(self) -> Iterable[Metric]:
        """Reads all metrics and yields them with the added labels."""
        for family in super().collect():
            if family.name.startswith(_OURS):
                for_all = self._labels
                family.samples = [sample._replace(labels={**for_all, **sample.labels}) for sample in family.samples]
            yield family


class Together(CollectorRegistry):
    """Combines registries, so that each metric name comes once. A gateway has one registry for each of its cells.

    No two of them may have the same series, because samples are joined as they are.
    """

    def __init__(self, of: Iterable[CollectorRegistry]) -> None:
        """`of`: the registries to combine."""
        super().__init__()
        self._of = list(of)

    def collect(self) -> Iterable[Metric]:
        """Reads all registries and returns their metrics, samples of one name joined."""
        families: dict[str, Metric] = {}
        for registry in self._of:
            for family in registry.collect():
                families.setdefault(family.name, family)
                if families[family.name] is not family:
                    families[family.name].samples.extend(family.samples)
        return families.values()


def service_registry(service: str, *, cell: str, model: str, numerics: str = "") -> ServiceRegistry:
    """Returns a registry with `process_*` (memory, CPU seconds, open files, start), `python_*` and
    `blockrelay_build_info`.

    `cell` and `model` (its name, as clients call it) become labels of every series of ours; `numerics` is the numerics
    id of a worker. Switches the `_created` series off for the whole process: they double the number of series and say
    little more than `process_start_time_seconds`.
    """
    disable_created_metrics()
    registry = ServiceRegistry({"cell": cell, "model": model})
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.tell_build(service=service, version=__version__, protocol=str(PROTOCOL))
    if numerics:
        registry.tell_build(numerics=numerics)
    return registry
