"""Chooses the plan that `up` starts with: from a file, by a strategy, or equal stages."""

from dataclasses import dataclass
from pathlib import Path

from blockrelay.errors import UsageError
from blockrelay.host.child_command import module_command, run_command
from blockrelay.planning.plan_file import read_plan_file
from blockrelay.protocol.planned_split import PlannedSplit, equal_parts, parse_planned

#: Fields of PlanChoice that only a strategy uses.
OF_A_STRATEGY = (
    "objective", "profile", "devices", "context", "requests", "boundaries", "targets", "memory_limit", "parts",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """The options for the first plan: `stages` equal stages, the file `plan`, or a `strategy` with its options.

    The other fields are the options of `blockrelay plan`; None: not given.
    """

    stages: int = 1
    stage_devices: str = ""
    """Class of device for each of `stages`, such as gpu,cpu,gpu; empty: any. Not used with `plan` or `strategy`."""
    plan: Path | None = None
    strategy: str | None = None
    objective: str | None = None
    profile: Path | None = None
    devices: Path | None = None
    context: int | None = None
    requests: int | None = None
    boundaries: str | None = None
    targets: str | None = None
    memory_limit: str | None = None
    parts: int | None = None
    """Number of stages for the strategy; `stages` wins if it is above 1."""

    def read(self, model: Path, blocks: int) -> PlannedSplit:
        """Returns the plan for the block folder `model`, which has `blocks` blocks.

        Raises UsageError for options that exclude each other or do not fit the blocks, and if the file or the strategy
        gives no plan.
        """
        if self.strategy is not None:
            if self.plan is not None:
                raise UsageError("--plan and --strategy: give one of them")
            return self._of_strategy(model, blocks)
        if strays := [name for name in OF_A_STRATEGY if getattr(self, name) is not None]:
            raise UsageError(f"--{strays[0].replace('_', '-')} is for --strategy")
        if self.plan is None:
            return equal_parts(blocks, self.stages, stage_devices=self.stage_devices)
        planned = read_plan_file(self.plan, blocks)
        if self.stages not in (1, len(planned.stages)):
            conflict = f"--stages is {self.stages}, and {self.plan} has {len(planned.stages)} stages"
            raise UsageError(f"{conflict}: give one of them")
        return planned

    def _of_strategy(self, model: Path, blocks: int) -> PlannedSplit:
        """Runs the planner as a command, because services do not import each other."""
        argv = module_command("blockrelay_scheduler.plan_command", "--model", model, "--json")
        given = {name: getattr(self, name) for name in ("strategy", *OF_A_STRATEGY)}
        if self.stages > 1:
            given["parts"] = self.stages
        argv += [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
        done = run_command(argv)
        if done.code:
            message = done.last_line
            raise UsageError(message if message.startswith("strategy ") else f"strategy {self.strategy}: {message}")
        planned = parse_planned(done.stdout, f"strategy {self.strategy}")
        if planned.blocks != blocks:
            raise UsageError(f"strategy {self.strategy} plans {planned.blocks} blocks, but the model has {blocks}")
        return planned
