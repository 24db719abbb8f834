"""The options of a drill. The module imports little, because the command line needs it for its help."""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from blockrelay_launcher.drill.faults import BY_DEFAULT, KINDS, ROLES, Kind, Role, parse_names
from blockrelay_launcher.option_groups import flag, option
from blockrelay_launcher.supervisor.embedded_redis import Fsync
from blockrelay_launcher.up_options.groups import ModelOrBlocksOptions, absolute

#: Default for the tokens of the longest answer, and tokens of the shortest; a short context limits both.
LONGEST_ANSWER, SHORTEST_ANSWER = 200, 4
#: Number of different requests; each is sent many times, with other salts and beside others.
DIFFERENT_REQUESTS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class DrilledModelOptions(ModelOrBlocksOptions):
    """The options of `blockrelay drill` about its model."""

    TITLE: ClassVar = "Model"
    sequential: Annotated[bool, flag("--sequential", "With --blocks: as for `up`.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrilledSystemOptions(DrilledModelOptions):
    """The options of `blockrelay drill` about the system that it starts with `up`."""

    TITLE: ClassVar = "System"
    plan: Annotated[
        Path | None,
        option("FILE", "Begin with this plan (blockrelay plan --json) instead of --stages.", callback=absolute),
    ] = None
    stages: Annotated[int, option("N", "Number of equal stages that the model is cut into.", min=1)] = 1
    stage_devices: Annotated[str, option("CLASSES", "With --gpu: as for `up`.")] = ""
    replicas: Annotated[int, option("N", "Number of CPU workers per stage.", min=1)] = 2
    gateways: Annotated[int, option("N", "Number of gateways; clients move to another if one dies.", min=1)] = 2
    schedulers: Annotated[int, option("N", "Number of schedulers.", min=1)] = 1
    other_precision: Annotated[
        Path | None,
        option("PATH", "Folder of the same checkpoint in another precision, for the faults.", callback=absolute),
    ] = None
    gpu: Annotated[str, option("ID,ID", "Run workers on these GPUs too, as for `up`.")] = ""
    fsync: Annotated[Fsync, option("always|everysec", "When the control Redis syncs to disk.")] = "always"
    users: Annotated[
        Path | None, option("DIR", "Run services as the Redis users of DIR/control.acl and DIR/payload.acl.")
    ] = None

    @property
    def workers(self) -> list[str]:
        """The names that `up` gives the processes of CPU workers; the stages of ONNX blocks share one.

        They follow from `stages`; with `plan`, `up` may start more.
        """
        processes = self.replicas if self.blocks is not None else self.stages * self.replicas
        return [f"worker-{n}" for n in range(1, processes + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions(DrilledSystemOptions):
    """The options of `blockrelay drill`."""

    TITLE: ClassVar = "Load and faults"
    minutes: Annotated[float, option("X", "Duration of the load in minutes.", min=0.05)] = 10.0
    requests: Annotated[int, option("N", "Number of requests at once.", min=1)] = 8
    longest_answer: Annotated[
        int, option("TOKENS", "Most new tokens of a request; most have fewer.", min=SHORTEST_ANSWER)
    ] = LONGEST_ANSWER
    kill: Annotated[
        str | None,
        option(
            "ROLE,ROLE",
            "Roles to hurt: worker, scheduler, gateway, redis, device (the process of a GPU, or of ONNX blocks); "
            "empty: none; default: all that exist.",
        ),
    ] = None
    faults: Annotated[
        str,
        option(
            "KIND,KIND",
            "Kinds of faults: kill; stop (a process, up to 8 s); full (Redis has no room, up to 3 s); cut "
            "(connections of Redis); replan (several stages get other borders). With --other-precision: precision "
            "(workers change to the other folder, and back); degrade (memory lacks for the larger one for a while). "
            "Not by default: swap (KV pages are few, and swapped ones are damaged); rank (workers share their stages "
            "with other processes, which are killed).",
        ),
    ] = ",".join(BY_DEFAULT)
    every: Annotated[float, option("S", "Mean time between two faults, in seconds.", min=0.1)] = 2.0
    upgrade: Annotated[
        bool, flag("--upgrade", "Replace all workers, in the middle third, by workers that compute other bits.")
    ] = False
    upgrade_from: Annotated[
        str | None,
        option(
            "PYTHON", "Run the release of this Python in the first half; then this release continues with its data."
        ),
    ] = None
    apply: Annotated[Path | None, option("FILE", "Apply this plan in the middle.", callback=absolute)] = None
    seed: Annotated[int | None, option("N", "Seed of requests, victims and times; default: a new one.")] = None
    different_requests: int = DIFFERENT_REQUESTS
    """Number of different requests."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles to hurt: those in `kill`, else all that exist. Raises UsageError for an unknown one."""
        with_device = ",device" if self.gpu or self.blocks is not None else ""
        roles = f"worker,scheduler,gateway,redis{with_device}" if self.kill is None else self.kill
        return parse_names(roles, "--kill", ROLES)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of faults. Raises UsageError for an unknown one."""
        return parse_names(self.faults, "--faults", KINDS)

    @property
    def replans(self) -> bool:
        """Whether stages get other borders. Not where there is one, where blocks come from others, or with a plan."""
        fixed = self.blocks is not None or self.plan or self.apply or self.upgrade or self.upgrade_from
        return "replan" in self.kinds and self.stages > 1 and not fixed

    @property
    def changes_precision(self) -> bool:
        """Whether workers change between two folders."""
        return "precision" in self.kinds and self.other_precision is not None

    @property
    def degrades(self) -> bool:
        """Whether memory lacks for the larger of two folders at times."""
        return "degrade" in self.kinds and self.other_precision is not None

    @property
    def swaps(self) -> bool:
        """Whether KV pages are few and those on the disk are damaged. Not where GPUs or ONNX blocks have them."""
        return "swap" in self.kinds and not self.gpu and self.blocks is None

    @property
    def loses_ranks(self) -> bool:
        """Whether workers have ranks that are killed. Not where GPUs or ONNX blocks compute."""
        return "rank" in self.kinds and not self.gpu and self.blocks is None

    @property
    def models(self) -> list[Path]:
        """The block folders: the one to start with, and the one in another precision, if there is one."""
        return [self.model, *filter(None, [self.other_precision])]

    def check(self, given: Set[str]) -> None:
        """Raises UsageError if both a model and blocks are given, and for unknown roles and kinds."""
        ModelOrBlocksOptions.check(self, given)
        _ = self.roles, self.kinds
