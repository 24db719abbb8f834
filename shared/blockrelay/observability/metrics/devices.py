"""Metrics of a worker's GPU and of the process that owns it."""

from collections.abc import Callable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from blockrelay.observability.metrics.instruments import counter

#: Why the process of a GPU is restarted: it was lost, or it became slow and a clean-up did not help.
RENEWALS = ("lost", "slow")


class DeviceMemoryFigures(Protocol):
    """The last memory figures of a device, in bytes. 0 stands for a figure that its provider does not report."""

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
    """Metrics of the GPU of one worker. Workers without a GPU have them too, at 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.canaries = counter(
            "blockrelay_worker_canaries",
            "Checks of the worker's GPU against a known answer between two steps, by result",
            registry,
            result=("right", "wrong", "failed"),
        )
        self.cleanups = counter(
            "blockrelay_worker_device_cleanups",
            "Clean-ups of the GPU's memory, each done because steps took 1.5 times as long as at first",
            registry,
        )
        self.changes = counter(
            "blockrelay_worker_device_changes",
            "Moves of the worker to another GPU of its host, or back to its own",
            registry,
        )
        self.renewals = counter(
            "blockrelay_worker_device_renewals",
            "Restarts of the process that owns the worker's GPU, by reason",
            registry,
            reason=RENEWALS,
        )
        self.quarantines = counter(
            "blockrelay_worker_device_quarantines",
            "Quarantines of the worker's GPU: it was lost too often in a short time",
            registry,
        )
        self.quarantined = Gauge(
            "blockrelay_worker_device_quarantined",
            "1 while the worker's GPU is in quarantine and not used, else 0",
            registry=registry,
        )
        bus_bytes = counter(
            "blockrelay_worker_device_bus_bytes",
            "Bytes copied to the worker's GPU (up) and from it (down)",
            registry,
            direction=("up", "down"),
        )
        jobs = counter(
            "blockrelay_worker_warm_session_jobs",
            "Steps of single ONNX blocks served as they are, by result: a job is one block of one step",
            registry,
            result=("ok", "failed"),
        )
        #: Counters by the names that the GPU's process gives its growing figures (`Figures.counted` of the worker).
        self.counters: Mapping[str, Counter] = {
            "up_bytes": bus_bytes.labels("up"),
            "down_bytes": bus_bytes.labels("down"),
            "repeated_steps": counter(
                "blockrelay_worker_device_repeated_steps",
                "Steps that replayed a recorded graph on the worker's GPU",
                registry,
            ),
            "recording_failures": counter(
                "blockrelay_worker_device_recording_failures",
                "Times that recording of steps was given up: recording failed, or the results were off by too much",
                registry,
            ),
            "retries": counter(
                "blockrelay_worker_device_retries",
                "Further tries to create or run a session on the worker's GPU, after a failure that may pass",
                registry,
            ),
            "made": counter(
                "blockrelay_worker_warm_sessions_made",
                "Sessions created for ONNX blocks served as they are",
                registry,
            ),
            "evicted": counter(
                "blockrelay_worker_warm_sessions_evicted",
                "Sessions of ONNX blocks served as they are that were closed to make room for others",
                registry,
            ),
            "load_seconds": counter(
                "blockrelay_worker_warm_session_load_seconds",
                "Time spent creating sessions for ONNX blocks served as they are",
                registry,
            ),
            "run_seconds": counter(
                "blockrelay_worker_warm_session_run_seconds",
                "Time of successful jobs of ONNX blocks served as they are, their failed tries included",
                registry,
            ),
            "clean_ups": counter(
                "blockrelay_worker_warm_session_cleanups",
                "Times that memory of closed sessions of ONNX blocks served as they are was given back to the system",
                registry,
            ),
            "jobs_ok": jobs.labels("ok"),
            "jobs_failed": jobs.labels("failed"),
        }
        self._weights = Gauge(
            "blockrelay_worker_device_weight_bytes", "Bytes of weights on the worker's GPU", registry=registry
        )
        self._pools = Gauge(
            "blockrelay_worker_device_pool_bytes",
            "Bytes of the KV pages on the worker's GPU, in use or not",
            registry=registry,
        )
        self._process = Gauge(
            "blockrelay_worker_device_process_bytes",
            "Bytes of host memory of the process that owns the worker's GPU",
            registry=registry,
        )
        self._memory = Gauge(
            "blockrelay_worker_device_memory_bytes",
            "Memory of the worker's GPU; 0 if its execution provider does not report it",
            registry=registry,
        )
        self._used = Gauge(
            "blockrelay_worker_device_memory_used_bytes",
            "Memory of the worker's GPU in use by all processes; 0 if its execution provider does not report it",
            registry=registry,
        )

    def show(self, memory: Callable[[], DeviceMemoryFigures | None]) -> None:
        """Has the gauges call `memory` when they are scraped. It returns None while no stage is on the device."""

        def read(figure: Callable[[DeviceMemoryFigures], int]) -> Callable[[], float]:
            def now() -> float:
                figures = memory()
                return 0.0 if figures is None else float(figure(figures))

            return now

        self._weights.set_function(read(lambda m: m.weight_bytes))
        self._pools.set_function(read(lambda m: m.pool_bytes))
        self._process.set_function(read(lambda m: m.process_bytes))
        self._memory.set_function(read(lambda m: m.memory_bytes))
        self._used.set_function(read(lambda m: m.memory_used_bytes))
