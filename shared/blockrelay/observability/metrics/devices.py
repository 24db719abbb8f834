"""Metrics of a worker's GPU and of the process that owns it."""

from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter

from blockrelay.observability.metrics.instruments import Instruments

#: Why the process of a GPU is restarted: it was lost, or it became slow and a clean-up did not help.
RENEWALS = ("lost", "slow")


#: Gauges of memory, by the names that the GPU's process gives their figures (`Figures` of the worker).
_MEMORY = {
    "weight_bytes": "Bytes of weights on the worker's GPU",
    "pool_bytes": "Bytes of the KV pages on the worker's GPU, in use or not",
    "process_bytes": "Bytes of host memory of the process that owns the worker's GPU",
    "memory_bytes": "Memory of the worker's GPU; 0 if its execution provider does not report it",
    "memory_used_bytes": "Memory of the worker's GPU in use by all processes; 0 if its execution provider does not "
    "report it",
}


class DeviceMetrics:
    """Metrics of the GPU of one worker. Workers without a GPU have them too, at 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Instruments(registry)
        self.canaries = make.counter(
            "blockrelay_worker_canaries",
            "Checks of the worker's GPU against a known answer between two steps, by result",
            result=("right", "wrong", "failed"),
        )
        self.cleanups = make.counter(
            "blockrelay_worker_device_cleanups",
            "Clean-ups of the GPU's memory, each done because steps took 1.5 times as long as at first",
        )
        self.changes = make.counter(
            "blockrelay_worker_device_changes", "Moves of the worker to another GPU of its host, or back to its own"
        )
        self.renewals = make.counter(
            "blockrelay_worker_device_renewals",
            "Restarts of the process that owns the worker's GPU, by reason",
            reason=RENEWALS,
        )
        self.quarantines = make.counter(
            "blockrelay_worker_device_quarantines",
            "Quarantines of the worker's GPU: it was lost too often in a short time",
        )
        self.quarantined = make.gauge(
            "blockrelay_worker_device_quarantined", "1 while the worker's GPU is in quarantine and not used, else 0"
        )
        bus_bytes = make.counter(
            "blockrelay_worker_device_bus_bytes",
            "Bytes copied to the worker's GPU (up) and from it (down)",
            direction=("up", "down"),
        )
        jobs = make.counter(
            "blockrelay_worker_warm_session_jobs",
            "Steps of single ONNX blocks served as they are, by result: a job is one block of one step",
            result=("ok", "failed"),
        )
        #: Counters by the names that the GPU's process gives its growing figures (`Figures.counted` of the worker).
        self.counters: Mapping[str, Counter] = {
            "up_bytes": bus_bytes.labels("up"),
            "down_bytes": bus_bytes.labels("down"),
            "repeated_steps": make.counter(
                "blockrelay_worker_device_repeated_steps", "Steps that replayed a recorded graph on the worker's GPU"
            ),
            "recording_failures": make.counter(
                "blockrelay_worker_device_recording_failures",
                "Times that recording of steps was given up: recording failed, or the results were off by too much",
            ),
            "retries": make.counter(
                "blockrelay_worker_device_retries",
                "Further tries to create or run a session on the worker's GPU, after a failure that may pass",
            ),
            "made": make.counter(
                "blockrelay_worker_warm_sessions_made", "Sessions created for ONNX blocks served as they are"
            ),
            "evicted": make.counter(
                "blockrelay_worker_warm_sessions_evicted",
                "Sessions of ONNX blocks served as they are that were closed to make room for others",
            ),
            "load_seconds": make.counter(
                "blockrelay_worker_warm_session_load_seconds",
                "Time spent creating sessions for ONNX blocks served as they are",
            ),
            "run_seconds": make.counter(
                "blockrelay_worker_warm_session_run_seconds",
                "Time of successful jobs of ONNX blocks served as they are, their failed tries included",
            ),
            "clean_ups": make.counter(
                "blockrelay_worker_warm_session_cleanups",
                "Times that memory of closed sessions of ONNX blocks served as they are was given back to the system",
            ),
            "jobs_ok": jobs.labels("ok"),
            "jobs_failed": jobs.labels("failed"),
        }
        self._memory = {
            figure: make.gauge(f"blockrelay_worker_device_{figure}", text) for figure, text in _MEMORY.items()
        }

    def show(self, read: Callable[[str], float]) -> None:
        """Has each gauge of memory call `read` when it is scraped.

        `read` takes the name that the GPU's process gives the figure, such as `weight_bytes`, and returns bytes.
        """
        for figure, gauge in self._memory.items():
            gauge.set_function(partial(read, figure))
