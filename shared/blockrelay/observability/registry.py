"""The metrics registry of a service, with what every service reports besides the instruments of its `metrics` group."""

from prometheus_client import CollectorRegistry, GCCollector, Info, PlatformCollector, ProcessCollector
from prometheus_client.metrics import disable_created_metrics

from blockrelay import __version__
from blockrelay.protocol.number import PROTOCOL


def service_registry(service: str) -> CollectorRegistry:
    """A registry with `process_*` (memory, CPU seconds, open files, start), `python_*` and `blockrelay_build_info`.

    Switches the `_created` series off for the whole process: they double the number of series and say little more than
    `process_start_time_seconds`.
    """
    disable_created_metrics()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    build = Info("blockrelay_build", "The release of this service and the protocol that it speaks", registry=registry)
    build.info({"service": service, "version": __version__, "protocol": str(PROTOCOL)})
    return registry
