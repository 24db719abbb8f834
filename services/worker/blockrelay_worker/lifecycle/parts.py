"""The parts of a worker that outlive its registrations."""

from dataclasses import dataclass

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.observability.registry import ServiceRegistry
from blockrelay.settings import WorkerSettings
from blockrelay_worker.execution.fault_injection import salted_id
from blockrelay_worker.execution.loader import Executors
from blockrelay_worker.lifecycle.on_device import OnDevice
from blockrelay_worker.transport.redis_links import Links


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """The parts of a worker that outlive its registrations."""

    settings: WorkerSettings
    folder: BlockFolder
    """The model, without its weights."""
    executors: Executors
    links: Links
    registry: ServiceRegistry
    metrics: WorkerMetrics
    """The metrics in `registry`."""
    device: OnDevice | None
    """The device that computes in a process of its own; None: our CPU kernels compute."""
    port: int
    """The port of the worker's status server."""

    @property
    def numerics(self) -> str:
        """The numerics id to register with; it changes with the device."""
        return salted_id(self.executors.numerics_id(self.folder.manifest), self.settings.inject_numerics)
