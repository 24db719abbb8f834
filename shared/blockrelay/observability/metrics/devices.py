"""What a worker tells of its GPU, whose process it watches."""

from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.instruments import counter

#: Why the process of a GPU is begun anew: it was lost, or became slow and a clean-up did not help.
RENEWALS = ("lost", "slow")


class DeviceMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.canaries = counter(
            "blockrelay_worker_canaries",
            "How often its GPU was asked for a known answer between two steps, by what came",
            registry,
            result=("right", "wrong", "failed"),
        )
        self.cleanups = counter(
            "blockrelay_worker_device_cleanups",
            "How often its GPU was made to give back memory because steps took half as long again",
            registry,
        )
        self.renewals = counter(
            "blockrelay_worker_device_renewals",
            "How often the process of its GPU was begun anew, by reason",
            registry,
            reason=RENEWALS,
        )
