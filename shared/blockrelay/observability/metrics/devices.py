"""What a worker tells of its GPU, whose process it watches."""

from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.instruments import counter


class DeviceMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.canaries = counter(
            "blockrelay_worker_canaries",
            "How often its GPU was asked for a known answer between two steps, by what came",
            registry,
            result=("right", "wrong", "failed"),
        )
