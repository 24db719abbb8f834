"""What a worker tells of its GPU, whose process it watches."""

from collections.abc import Callable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from blockrelay.observability.metrics.instruments import counter

#: Why the process of a GPU is begun anew: it was lost, or became slow and a clean-up did not help.
RENEWALS = ("lost", "slow")


class Memory(Protocol):
    """Bytes that a device has told of."""

    @property
    def weight_bytes(self) -> int: ...
    @property
    def pool_bytes(self) -> int: ...
    @property
    def process_bytes(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def memory_used_bytes(self) -> int: ...


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
        self.changes = counter(
            "blockrelay_worker_device_changes",
            "How often it went on with another GPU of its host, or came back to its own",
            registry,
        )
        self.renewals = counter(
            "blockrelay_worker_device_renewals",
            "How often the process of its GPU was begun anew, by reason",
            registry,
            reason=RENEWALS,
        )
        self.quarantines = counter(
            "blockrelay_worker_device_quarantines", "How often its GPU was lost too often of late", registry
        )
        self.quarantined = Gauge(
            "blockrelay_worker_device_quarantined",
            "Whether its GPU is left alone for an hour (1) or not (0)",
            registry=registry,
        )
        bus_bytes = counter(
            "blockrelay_worker_device_bus_bytes",
            "How many bytes went up to its GPU and came down from it",
            registry,
            direction=("up", "down"),
        )
        jobs = counter(
            "blockrelay_worker_warm_session_jobs",
            "How often a session of ONNX blocks as they are computed its part of a step, by what came of it",
            registry,
            result=("ok", "failed"),
        )
        #: What a device tells of itself that only grows, by its names in `Figures.counted`.
        self.counters: Mapping[str, Counter] = {
            "up_bytes": bus_bytes.labels("up"),
            "down_bytes": bus_bytes.labels("down"),
            "repeated_steps": counter(
                "blockrelay_worker_device_repeated_steps",
                "How many steps its GPU did by repeating recorded ones",
                registry,
            ),
            "recording_failures": counter(
                "blockrelay_worker_device_recording_failures",
                "How often it was given up to record steps of its GPU: one failed, or was off by too much",
                registry,
            ),
            "retries": counter(
                "blockrelay_worker_device_retries",
                "How often making a session on its GPU, or running it there, was tried again behind a failure that may "
                "pass",
                registry,
            ),
            "made": counter(
                "blockrelay_worker_warm_sessions_made",
                "How many sessions of ONNX blocks as they are were made",
                registry,
            ),
            "evicted": counter(
                "blockrelay_worker_warm_sessions_evicted", "How many of them made room for others", registry
            ),
            "load_seconds": counter(
                "blockrelay_worker_warm_session_load_seconds", "How long making them took", registry
            ),
            "run_seconds": counter("blockrelay_worker_warm_session_run_seconds", "How long their jobs took", registry),
            "clean_ups": counter(
                "blockrelay_worker_warm_session_cleanups",
                "How often memory of those that had gone was given back to the system",
                registry,
            ),
            "jobs_ok": jobs.labels("ok"),
            "jobs_failed": jobs.labels("failed"),
        }
        self._weights = Gauge(
            "blockrelay_worker_device_weight_bytes", "How many bytes of weights are on its GPU", registry=registry
        )
        self._pools = Gauge(
            "blockrelay_worker_device_pool_bytes",
            "How many bytes KV pages take on its GPU, used or not",
            registry=registry,
        )
        self._process = Gauge(
            "blockrelay_worker_device_process_bytes",
            "How many bytes of this machine's memory the process of its GPU has",
            registry=registry,
        )
        self._memory = Gauge(
            "blockrelay_worker_device_memory_bytes",
            "How much memory its GPU has, where the provider tells; else 0",
            registry=registry,
        )
        self._used = Gauge(
            "blockrelay_worker_device_memory_used_bytes",
            "How much of that is in use, by whomever",
            registry=registry,
        )

    def show(self, memory: Callable[[], Memory | None]) -> None:
        """From now on gauges ask this when they are read; None: there is no stage on the device."""

        def read(what: Callable[[Memory], int]) -> Callable[[], float]:
            def now() -> float:
                found = memory()
                return 0.0 if found is None else float(what(found))

            return now

        self._weights.set_function(read(lambda m: m.weight_bytes))
        self._pools.set_function(read(lambda m: m.pool_bytes))
        self._process.set_function(read(lambda m: m.process_bytes))
        self._memory.set_function(read(lambda m: m.memory_bytes))
        self._used.set_function(read(lambda m: m.memory_used_bytes))
