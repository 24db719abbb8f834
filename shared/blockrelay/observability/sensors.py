"""The sensors of this machine's GPUs as metrics, read at each scrape. A sensor that does not answer has no series."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from blockrelay.host.gpu_sensors import GpuReading


class Sensors(Collector):
    """Exports utilisation, temperature and power of all GPUs of the machine, whichever process uses them.

    All workers of one machine report the same values.
    """

    def __init__(self, registry: CollectorRegistry, read: Callable[[], Iterable[GpuReading]]) -> None:
        """`read` returns the current values of all GPUs. It is called at each scrape."""
        self._read = read
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        utilisation = _gauge("utilisation_ratio", "Share of the time in which a GPU of this machine computed (0 to 1)")
        temperature = _gauge("temperature_celsius", "Temperature of a GPU of this machine")
        power = _gauge("power_watts", "Power that a GPU of this machine draws")
        for gpu in self._read():
            values = ((utilisation, gpu.utilisation), (temperature, gpu.temperature_celsius), (power, gpu.power_watts))
            for family, value in values:
                if value is not None:
                    family.add_metric([gpu.gpu], value)
        yield from (utilisation, temperature, power)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"blockrelay_worker_gpu_{name}", f"{text}, if its driver reports it", labels=["gpu"])
