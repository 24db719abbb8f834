"""The stages that strategy `auto` chooses from, and their costs. Pure.

A stage is consecutive blocks on some devices of one kind. Devices are of one kind when swapping them changes nothing:
they have the same class, figures and memory, and no link distinguishes their hosts. CPU devices of one host share its
cores, and only one of them is used.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from blockrelay.planning.devices import Device, Fleet
from blockrelay_scheduler.planning.prediction import resource
from blockrelay_scheduler.planning.problem import Problem

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Option:
    """A choice of devices for a stage: `replicas` devices of kind number `kind`."""

    kind: int
    replicas: int


@dataclass(frozen=True, slots=True)
class Tables:
    """The seconds of every stage on every option, for one group of requests when `groups` groups are in flight.

    N is the number of blocks of the model.
    """

    groups: int
    seconds: tuple[F64, ...]
    """One table [N+1, N+1] for each option: at [i, j] the stage of blocks i+1 to j; inf where it is empty
    or does not fit."""
    sums: tuple[F64, ...]
    """One array [N+1] for each option: blocks 1 to i at index i. `seconds` are differences of these."""
    hops: F64
    """Seconds of a hop after block i, at index i, from kind to kind: [N+1, kinds, kinds]. There is no hop at the first
    and the last index."""
    backs: F64
    """Seconds of the tokens' way back, from the kind of the last stage to that of the first: [kinds, kinds]."""

    @property
    def starts(self) -> list[int | None]:
        """The kinds of the first stage to search one by one, because the way back differs; [None]: all at once."""
        return [None] if np.all(self.backs == self.backs[0, 0]) else list(range(len(self.backs)))

    def least_seconds(self, stages: int) -> float:
        """Returns a lower bound of the seconds of all plans of `stages` stages, 1 to N.

        It has every block where it is fastest, and for every hop the shortest.
        """
        each = np.min([np.diff(sums) for sums in self.sums], axis=0).sum()
        if stages == 1:
            return float(each)
        return float(each + (stages - 1) * self.hops[1:-1].min() + self.backs.min())


@dataclass(frozen=True)
class Space:
    """All choices of devices for the stages of one problem."""

    problem: Problem
    kinds: tuple[tuple[Device, ...], ...]
    """The devices that may be used, by kind; within a kind in the fleet's order."""

    @classmethod
    def of(cls, problem: Problem, *, roomiest: bool = False) -> "Space":
        """Returns the space of a problem; of CPU devices that share cores it has the fastest, or the `roomiest`."""
        kinds: dict[tuple[object, ...], list[Device]] = defaultdict(list)
        devices = _own_resources(problem, roomiest=roomiest)
        alike = _alike_hosts(problem.fleet, devices)
        for device in devices:
            kinds[_kind(problem, device, alike)].append(device)
        return cls(problem, tuple(tuple(devices) for devices in kinds.values()))

    @property
    def requests(self) -> int:
        """Requests at once for which the plan is made: 1 for latency."""
        return 1 if self.problem.objective == "latency" else self.problem.promise.requests

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """All kinds with all numbers of replicas; there are at most as many replicas as requests, which they share."""
        return tuple(
            Option(kind, replicas)
            for kind, devices in enumerate(self.kinds)
            for replicas in range(1, min(len(devices), self.requests) + 1)
        )

    @property
    def most_stages(self) -> int:
        """The largest number of stages that a plan can have."""
        return min(self.problem.blocks, sum(map(len, self.kinds)))

    def groups(self, stages: int) -> int:
        """Returns how many groups of requests are in flight in a route of `stages` stages."""
        return min(stages, self.requests)

    def tables(self, groups: int) -> Tables:
        """Returns the costs of all stages when `groups` groups are in flight."""
        problem, context = self.problem, self.problem.promise.context / 2
        seconds, by_option = list[F64](), list[F64]()
        for option in self.options:
            device = self.kinds[option.kind][0]
            rows = max(1.0, self.requests / groups / option.replicas)
            sums = np.asarray(problem.costs.prefix_seconds(device, rows, context))
            table = sums[None, :] - sums[:, None]
            table[~self._fits[option]] = np.inf
            seconds.append(table)
            by_option.append(sums)
        borders = [self.requests / groups * problem.costs.hop_bytes(i, context) for i in range(1, problem.blocks)]
        by_size = {size: self._hops(size) for size in {0.0, *borders}}
        hops, backs = np.stack([by_size[size] for size in (0.0, *borders, 0.0)]), by_size[0.0]
        return Tables(groups, tuple(seconds), tuple(by_option), hops, backs)

    def _hops(self, size: float) -> F64:
        """Seconds of a hop of `size` bytes from kind to kind; within a kind, between two of its devices."""
        costs, fleet = self.problem.costs, self.problem.fleet
        return np.array([[costs.hop_seconds(fleet, a[0], b[-1], size) for b in self.kinds] for a in self.kinds])

    @cached_property
    def _fits(self) -> dict[Option, NDArray[np.bool_]]:
        """One table [N+1, N+1] for each option: at [i, j] True if blocks i+1 to j are a stage that has room."""
        problem, order = self.problem, np.arange(self.problem.blocks + 1)
        by_option: dict[Option, NDArray[np.bool_]] = {}
        for option in self.options:
            fits = order[:, None] < order[None, :]
            device = self.kinds[option.kind][0]
            memory = problem.room_of(device)
            if memory is not None:
                needed = np.array([problem.bytes_of(1, int(last), device, option.replicas) for last in order])
                fits &= needed[None, :] - needed[:, None] <= memory
            by_option[option] = fits
        return by_option


def _own_resources(problem: Problem, *, roomiest: bool) -> list[Device]:
    """Returns the devices of the fleet, and of those that share cores only the fastest, or the `roomiest`."""

    def rank(device: Device) -> float:
        room = problem.room_of(device)
        return (-inf if room is None else -room) if roomiest else _seconds(problem, device)

    best: dict[tuple[str, str], Device] = {}
    for device in problem.fleet.devices:
        key = resource(device)
        if key not in best or rank(device) < rank(best[key]):
            best[key] = device
    return list(best.values())


def _seconds(problem: Problem, device: Device) -> float:
    return problem.costs.seconds(device, 1, problem.blocks, 1, problem.promise.context / 2)


def _kind(problem: Problem, device: Device, alike: Mapping[str, str]) -> tuple[object, ...]:
    """Returns a key that is equal for devices of one kind; `alike` has the host that stands for each host."""
    return (
        device.device_class, problem.room_of(device), device.speed, device.bytes_per_second,
        device.operations_per_second, alike[device.host],
    )  # fmt: skip


def _alike_hosts(fleet: Fleet, devices: Sequence[Device]) -> dict[str, str]:
    """Returns for every host the host that stands for all that are like it; "" stands for those without a link.

    Hosts are alike if no hop changes when they change places: hosts with a single device and equal links to all others,
    and hosts without any link.
    """
    linked = {host for link in fleet.links if link.seconds or link.seconds_per_byte for host in link.between}
    count = Counter(device.host for device in devices)

    def hop(a: str, b: str) -> tuple[float, float]:
        link = fleet.link(a, b)
        return (link.seconds, link.seconds_per_byte) if link else (0.0, 0.0)

    def alike(a: str, b: str) -> bool:
        if count[a] > 1 or count[b] > 1:
            return False
        return all(hop(a, other) == hop(b, other) for other in linked - {a, b})

    stands_for: dict[str, str] = {}
    for host in count:
        if host not in linked:
            stands_for[host] = ""
        else:
            stands_for[host] = next((one for one in stands_for if one in linked and alike(one, host)), host)
    return stands_for
