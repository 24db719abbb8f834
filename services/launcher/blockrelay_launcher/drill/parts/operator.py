"""The parts of a drill that do what an operator would: they apply other plans, and retry lost GPUs at once."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from blockrelay.block_folder.folder import open_block_folder
from blockrelay.errors import RedisTrouble
from blockrelay.host.child_command import module_command, run_command
from blockrelay.protocol.keys import Keys
from blockrelay.redis.errors import CommandError
from blockrelay.redis.plan_history import append, read_history
from blockrelay.redis.registry import read_lost_devices, retry_lost_device
from blockrelay_launcher.drill.faults import Fault, other_borders
from blockrelay_launcher.drill.parts.part import DrillPart
from blockrelay_launcher.drill.system import DrilledSystem

#: Seconds before another try: Redis may be away or full, and workers dead, when the plan is applied.
AGAIN_S = 0.5
#: Mean seconds between two plans: blocks take a second or two to move, and some plans come before that.
REPLAN_EVERY_S = 5.0
#: Mean seconds between two changes of the precision: requests of the old one have to end in each.
PRECISION_EVERY_S = 12.0
#: Seconds between two checks for lost devices.
LOOK_S = 0.5


@dataclass(slots=True)
class PlanSwitch(DrillPart):
    """The part that applies the plan in `file` at the time `at` (monotonic): all workers load other blocks.

    It is no fault: `done` stays empty.
    """

    system: DrilledSystem
    file: Path
    at: float
    _problem: str = field(default="it was not its time yet", init=False)
    """Why the plan is not applied; empty: it is."""

    @property
    def troubles(self) -> list[str]:
        """A sentence if the plan was not applied."""
        return [f"the plan {self.file} was not applied: {self._problem}"] if self._problem else []

    def _run(self) -> None:
        wait = max(0.0, self.at - time.monotonic())
        while self._problem and not self._over.wait(wait):
            options = ["--json", "--data", self.system.data]
            done = run_command(module_command("blockrelay_launcher", "plan", "apply", self.file, *options))
            self._problem = done.last_line if done.code else ""
            wait = AGAIN_S


@dataclass(slots=True)
class Replans(DrillPart):
    """The part that gives the system other borders between its `stages` stages, REPLAN_EVERY_S apart on average.

    One that Redis does not take is left out.
    """

    system: DrilledSystem
    rng: Random
    stages: int

    def _run(self) -> None:
        folder = open_block_folder(Path(self.system.running.model), blocks=[])
        keys, model, blocks = Keys(self.system.running.cell), folder.model_key, folder.model.blocks
        while not self._over.wait(REPLAN_EVERY_S * self.rng.uniform(0.5, 1.5)):
            with suppress(RedisTrouble, CommandError), self.system.administrator("redis-control") as client:
                history = read_history(client, keys, model)
                split = other_borders(self.rng, blocks, self.stages, history[0].planned.text)
                planned = replace(history[0].planned, stages=split)
                if append(client, keys, model, planned, origin="apply", who="drill", behind=history[0].id):
                    self.done.append(Fault(at=time.monotonic(), kind="replan", target="scheduler"))


@dataclass(slots=True)
class PrecisionChanges(DrillPart):
    """The part that has all workers change between the block folders `models`, PRECISION_EVERY_S apart on average.

    Some changes come before the one before them is over. One that Redis does not take is left out.
    """

    system: DrilledSystem
    rng: Random
    models: Sequence[Path]

    def _run(self) -> None:
        model, other = (open_block_folder(path, blocks=[]).model_key for path in self.models)
        keys = Keys(self.system.running.cell)
        while not self._over.wait(PRECISION_EVERY_S * self.rng.uniform(0.2, 1.8)):
            with suppress(RedisTrouble, CommandError), self.system.administrator("redis-control") as client:
                history = read_history(client, keys, model)
                planned = replace(history[0].planned, folder="" if history[0].planned.folder else other)
                if append(client, keys, model, planned, origin="precision", who="drill", behind=history[0].id):
                    self.done.append(Fault(at=time.monotonic(), kind="precision", target="scheduler"))


@dataclass(slots=True)
class DeviceRetries(DrillPart):
    """The part that retries lost GPUs, in quarantine or not: a drill kills them so often that few would serve."""

    system: DrilledSystem

    def _run(self) -> None:
        keys = Keys(self.system.running.cell)
        while not self._over.wait(LOOK_S):
            with suppress(RedisTrouble, CommandError), self.system.administrator("redis-control") as client:
                for lost in read_lost_devices(client, keys):
                    retry_lost_device(client, keys, lost)
