"""What a drill is told. Light: the command line has it before anything is run."""

from dataclasses import dataclass
from pathlib import Path

from blockrelay_launcher.drill.faults import KINDS, Kind, Role
from blockrelay_launcher.supervisor.embedded_redis import Fsync

#: Tokens of the longest answer unless told, and of the shortest; shorter where the model's context is.
LONGEST_ANSWER, SHORTEST_ANSWER = 200, 4
#: Different requests; each is sent many times, under other salts and beside others.
ASKS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """`requests` at once, of at most `longest_answer` tokens each. `seed` None: a new one, which is told. `upgrade`: in
    the middle third all workers are replaced by such that compute other bits. `users`: folder of the ACL files that are
    in force. `upgrade_from`: the Python of another release, which serves for the first half; then this one goes on with
    its data. `plan` is the plan to start with, not `stages`; `apply` the one that is applied in the middle. `gpu` and
    `stage_devices` as of `up`: then a fifth of the requests to an exact model keep off GPUs. `blocks`: a folder of ONNX
    blocks that others made is served as it is, not `model`; `sequential` as of `up`."""

    model: Path
    seconds: float
    roles: tuple[Role, ...]
    kinds: tuple[Kind, ...] = KINDS
    every_s: float = 2.0
    seed: int | None = None
    fsync: Fsync = "always"
    requests: int = 8
    longest_answer: int = LONGEST_ANSWER
    stages: int = 1
    replicas: int = 2
    gateways: int = 2
    schedulers: int = 1
    upgrade: bool = False
    users: Path | None = None
    upgrade_from: str | None = None
    plan: Path | None = None
    apply: Path | None = None
    gpu: str = ""
    stage_devices: str = ""
    blocks: Path | None = None
    sequential: bool = False
    asks: int = ASKS

    @property
    def workers(self) -> list[str]:
        """The names that `up` gives the processes of workers on CPUs: stages of ONNX blocks share one."""
        processes = self.replicas if self.blocks is not None else self.stages * self.replicas
        return [f"worker-{n}" for n in range(1, processes + 1)]
