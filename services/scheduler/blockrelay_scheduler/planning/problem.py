"""The problem that a planning strategy gets, and the placement that it returns. Data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from blockrelay.block_folder.analysis import ModelAnalysis
from blockrelay.errors import UsageError
from blockrelay.planning.devices import Device, Fleet
from blockrelay.protocol.plan import Stage
from blockrelay.protocol.planned_split import PlannedSplit, planned_for
from blockrelay.quantities import counted
from blockrelay_scheduler.planning.cost_model import CostModel

#: The speed that strategy `auto` optimises: of one request, or of all promised requests together.
Objective = Literal["latency", "throughput"]


class NoPlan(UsageError):
    """No plan fits these devices; the message says what is short, on which device, by how much, and what would fit."""


class OutOfTime(UsageError):
    """The time limit of a search passed before a plan was proved best, or before any was known to fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """A user's restrictions of a strategy. None: no restriction."""

    parts: int | None = None
    """The number of parts."""
    boundaries: tuple[tuple[int, int], ...] | None = None
    """The first and last block of each part, 1-based and inclusive."""
    targets: tuple[str, ...] | None = None
    """The id of each part's device; for a strategy that chooses devices, the ids to choose from."""
    memory_limit: int | None = None
    """The most bytes that one part may need on a device."""


NO_WISHES = Wishes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The load that is planned for: KV pages have room for `requests` requests at once of `context` tokens each."""

    context: int
    requests: int

    def __str__(self) -> str:
        return f"{counted(self.requests, 'request')} of {counted(self.context, 'token')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything that a plan is decided from."""

    analysis: ModelAnalysis
    fleet: Fleet
    costs: CostModel
    objective: Objective
    promise: Promise
    wishes: Wishes = NO_WISHES
    check_cut: Callable[[Sequence[Stage]], None] = lambda _: None
    """Raises BlockFolderError for stages that the model cannot be cut into."""
    guessed: bool = False
    """True if neither a file of devices nor a profile says how fast the fleet is."""

    @property
    def blocks(self) -> int:
        """The number of blocks of the model."""
        return len(self.analysis.blocks)

    def bytes_of(self, first: int, last: int, device: Device, replicas: int = 1) -> int:
        """Bytes that blocks [first, last] (1-based, inclusive) need on each of `replicas` devices: weights and KV
        pages."""
        return self.costs.weight_bytes(first, last, device) + self.kv_bytes(first, last, replicas)

    def kv_bytes(self, first: int, last: int, replicas: int = 1) -> int:
        """Bytes of the promised requests' KV pages on each of `replicas` devices, for blocks [first, last]."""
        tokens = self.promise.context * -(-self.promise.requests // replicas)
        return tokens * self.costs.kv_bytes_per_token(first, last)

    def room_of(self, device: Device) -> int | None:
        """Most bytes that a part on this device may need; None: no limit is known."""
        limits = [each for each in (device.memory_bytes, self.wishes.memory_limit) if each is not None]
        return min(limits, default=None)

    def target_devices(self, parts: int) -> tuple[Device, ...]:
        """Returns the device of each part: the wished targets and then a CPU, or without wishes all devices in turn.

        In a fleet without a CPU, its first device takes that place. Raises UsageError for more targets than parts, and
        for a target that is not in the fleet.
        """
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
        """Number of parts for a strategy that does not choose it: as wished, one for each target, or for each device.

        If it is not wished, it is at most the number of blocks. Raises UsageError for a wish of more parts than blocks.
        """
        wished = self.wishes.parts or len(self.wishes.targets or self.fleet.devices)
        if not 1 <= wished <= self.blocks:
            if self.wishes.parts is None:
                return min(wished, self.blocks)
            raise UsageError(f"{wished} parts of {self.blocks} blocks: choose 1 to {self.blocks}")
        return wished


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Blocks [first, last] (1-based, inclusive) as one stage of a placement."""

    first: int
    last: int
    devices: tuple[str, ...]
    """Ids of its devices; each of several is a replica that runs all these blocks."""
    reason: str
    """Why it has these blocks, as text for the user."""

    @property
    def blocks(self) -> str:
        """The blocks as text for messages: `block_4`, or `block_1 to block_3`."""
        return f"block_{self.first}" if self.first == self.last else f"block_{self.first} to block_{self.last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The result of a strategy: parts that cover all blocks in order, without a gap."""

    parts: tuple[Part, ...]
    notes: Mapping[str, object] | None = None
    """Further fields for `plan --json`; tables print the one called `summary`."""

    def as_planned(self, fleet: Fleet) -> PlannedSplit:
        """Returns the placement as a scheduler publishes it; `fleet` has the classes of its devices."""
        return PlannedSplit(
            stages=tuple(Stage(first=part.first, last=part.last) for part in self.parts),
            reasons=tuple(planned_for(part.devices, part.reason) for part in self.parts),
            devices=tuple(part.devices for part in self.parts),
            classes=tuple(fleet.device(part.devices[0]).device_class for part in self.parts),
        )


#: A planning strategy. It raises UsageError (NoPlan, OutOfTime) where it has no placement for the problem.
Strategy = Callable[[Problem], Placement]


def placed_in_turn(problem: Problem, bounds: Sequence[tuple[int, int]], reasons: Sequence[str]) -> Placement:
    """Returns a placement of parts with these first and last blocks, in turn on the target devices.

    `bounds` and `reasons` have one entry for each part. Raises UsageError for more targets than parts, and for a target
    that is not in the fleet.
    """
    devices = problem.target_devices(len(bounds))
    return Placement(
        parts=tuple(
            Part(first=first, last=last, devices=(device.id,), reason=reason)
            for (first, last), device, reason in zip(bounds, devices, reasons, strict=True)
        )
    )
