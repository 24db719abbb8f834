"""What a strategy is given, and what it answers. Data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from blockrelay.block_folder.analysis import ModelAnalysis
from blockrelay.errors import UsageError
from blockrelay.planning.devices import Device, Fleet
from blockrelay.protocol.plan import Stage
from blockrelay.protocol.planned_split import PlannedSplit, planned_for
from blockrelay.quantities import counted
from blockrelay_scheduler.planning.cost_model import CostModel

Objective = Literal["latency", "throughput"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


class NoPlan(UsageError):
    """No plan fits these devices; the message says what is short, where, by how much, and what would fit."""


class OutOfTime(UsageError):
    """Whether a plan is the best, or whether any fits, was not known soon enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a user asks of a strategy beyond its name. None: the strategy chooses.

    `boundaries` are the first and last block of each part; `targets` the device of each, or, for a strategy that
    chooses them, those to choose from; `memory_limit` bytes of one part at most.
    """

    parts: int | None = None
    boundaries: tuple[tuple[int, int], ...] | None = None
    targets: tuple[str, ...] | None = None
    memory_limit: int | None = None


NO_WISHES = Wishes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What must have room in KV pages, and what throughput is planned for: `requests` at once of `context` tokens."""

    context: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """All that a plan is decided from."""

    analysis: ModelAnalysis
    fleet: Fleet
    costs: CostModel
    objective: Objective
    promise: Promise
    wishes: Wishes = NO_WISHES
    check_cut: Callable[[Sequence[Stage]], None] = lambda _: None
    """Raises BlockFolderError for stages that the model cannot be cut into."""
    guessed: bool = False
    """Nobody said how fast the fleet is."""

    @property
    def blocks(self) -> int:
        return len(self.analysis.blocks)

    def bytes_of(self, first: int, last: int, device: Device, replicas: int = 1) -> int:
        """Weights of blocks [first, last] (1-based, inclusive) on this device, and KV pages on each of `replicas`
        workers."""
        return self.costs.weight_bytes(first, last, device) + self.kv_bytes(first, last, replicas)

    def kv_bytes(self, first: int, last: int, replicas: int = 1) -> int:
        """KV pages of the promised requests, shared out to `replicas` workers."""
        tokens = self.promise.context * -(-self.promise.requests // replicas)
        return tokens * self.costs.kv_bytes_per_token(first, last)

    def room_of(self, device: Device) -> int | None:
        """Bytes that a part on this device may have; None: as many as it needs."""
        limits = [each for each in (device.memory_bytes, self.wishes.memory_limit) if each is not None]
        return min(limits, default=None)

    def target_devices(self, parts: int) -> tuple[Device, ...]:
        """The device of each part: those that were wished for, else all in turn; where the wishes end, a CPU."""
        if self.wishes.targets is None:
            return tuple(self.fleet.devices[at % len(self.fleet.devices)] for at in range(parts))
        named = [self.fleet.device(name) for name in self.wishes.targets]
        if len(named) > parts:
            what = "block" if parts == self.blocks else "part"
            raise UsageError(f"{len(named)} devices for {counted(parts, what)}: each device needs one")
        cpu = next((d for d in self.fleet.devices if d.device_class == "CPU"), self.fleet.devices[0])
        return (*named, *[cpu] * (parts - len(named)))

    @property
    def parts(self) -> int:
        """How many a strategy that does not choose makes: as wished, as there are targets, or one for each device."""
        wished = self.wishes.parts or len(self.wishes.targets or self.fleet.devices)
        if not 1 <= wished <= self.blocks:
            if self.wishes.parts is None:
                return min(wished, self.blocks)
            raise UsageError(f"{wished} parts of {self.blocks} blocks: choose 1 to {self.blocks}")
        return wished


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Blocks [first, last] as one stage, on each of `devices` (several: replicas), and why."""

    first: int
    last: int
    devices: tuple[str, ...]
    reason: str

    @property
    def blocks(self) -> str:
        """For people: `block_4`, or `block_1 to block_3`."""
        return f"block_{self.first}" if self.first == self.last else f"block_{self.first} to block_{self.last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What a strategy chose: parts that cover block 1 to the last without a gap, and what else it says of itself."""

    parts: tuple[Part, ...]
    notes: Mapping[str, object] | None = None

    def as_planned(self, fleet: Fleet) -> PlannedSplit:
        """The same for schedulers to publish, with the classes that `fleet` has for its devices."""
        return PlannedSplit(
            stages=tuple(Stage(first=part.first, last=part.last) for part in self.parts),
            reasons=tuple(planned_for(part.devices, part.reason) for part in self.parts),
            devices=tuple(part.devices for part in self.parts),
            classes=tuple(fleet.device(part.devices[0]).device_class for part in self.parts),
        )


Strategy = Callable[[Problem], Placement]


def consecutive(problem: Problem, sizes: Sequence[int], reasons: Sequence[str]) -> Placement:
    """Parts of these sizes, in turn on the target devices; empty ones are left out."""
    devices = problem.target_devices(len(sizes))
    parts: list[Part] = []
    first = 1
    for size, device, reason in zip(sizes, devices, reasons, strict=True):
        if size:
            parts.append(Part(first=first, last=first + size - 1, devices=(device.id,), reason=reason))
        first += size
    return Placement(parts=tuple(parts))
