"""The options of a drill. The module imports little, because the command line needs it for its help."""

from dataclasses import dataclass
from pathlib import Path

from blockrelay_launcher.drill.faults import KINDS, Kind, Role
from blockrelay_launcher.supervisor.embedded_redis import Fsync

#: Default for the tokens of the longest answer, and tokens of the shortest; a short context limits both.
LONGEST_ANSWER, SHORTEST_ANSWER = 200, 4
#: Number of different requests; each is sent many times, with other salts and beside others.
ASKS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """The options of `blockrelay drill`. Those without a description are the options of `up` with the same names."""

    model: Path
    seconds: float
    """Duration of the load."""
    roles: tuple[Role, ...]
    """Roles to hurt."""
    kinds: tuple[Kind, ...] = KINDS
    every_s: float = 2.0
    """Mean time between two faults, in seconds."""
    seed: int | None = None
    """None: a new one, which the drill prints."""
    fsync: Fsync = "always"
    requests: int = 8
    """Requests at once."""
    longest_answer: int = LONGEST_ANSWER
    """Most new tokens of a request."""
    stages: int = 1
    replicas: int = 2
    gateways: int = 2
    schedulers: int = 1
    upgrade: bool = False
    """Replace all workers, in the middle third, by workers that compute other bits."""
    users: Path | None = None
    """Folder of the ACL files whose Redis users the services are."""
    upgrade_from: str | None = None
    """The Python of another release, which serves in the first half; then this release continues with its data."""
    plan: Path | None = None
    """The first plan, instead of `stages`."""
    apply: Path | None = None
    """A plan to apply in the middle."""
    gpu: str = ""
    """GPUs for workers; then a fifth of the requests to an exact model keep off GPUs."""
    stage_devices: str = ""
    blocks: Path | None = None
    """Folder of ONNX blocks to serve as they are, instead of `model`."""
    sequential: bool = False
    asks: int = ASKS
    """Number of different requests."""

    @property
    def workers(self) -> list[str]:
        """The names that `up` gives the processes of CPU workers; the stages of ONNX blocks share one."""
        processes = self.replicas if self.blocks is not None else self.stages * self.replicas
        return [f"worker-{n}" for n in range(1, processes + 1)]
