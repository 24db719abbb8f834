"""The sensors of GPUs as metrics, read at each scrape; a sensor that does not answer has no series."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from blockrelay.host.gpu_sensors import GpuReading


class Sensors(Collector):
    """The GPUs of a worker's machine, in use by whomever. Workers of one machine tell the same."""

    def __init__(self, registry: CollectorRegistry, read: Callable[[], Iterable[GpuReading]]) -> None:
        self._read = read
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        utilisation = _gauge("utilisation_ratio", "Share of the time in which a GPU of this machine computed (0 to 1)")
        temperature = _gauge("temperature_celsius", "How hot a GPU of this machine is")
        power = _gauge("power_watts", "How much power a GPU of this machine takes")
        for one in self._read():
            told = ((utilisation, one.utilisation), (temperature, one.temperature_celsius), (power, one.power_watts))
            for family, value in told:
                if value is not None:
                    family.add_metric([one.gpu], value)
        yield from (utilisation, temperature, power)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"blockrelay_worker_gpu_{name}", f"{text}, where its driver tells", labels=["gpu"])
