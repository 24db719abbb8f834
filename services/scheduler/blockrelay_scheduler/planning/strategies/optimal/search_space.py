"""What `auto` chooses from: stages of consecutive blocks, each on some devices of one kind. Pure.

Devices are of one kind when swapping them changes nothing: the same class, figures and memory, and hosts that no link
tells apart. Of the CPU devices of one host, which share its cores, the fastest counts.
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
    """A way to run a stage: on `replicas` devices of kind number `kind`."""

    kind: int
    replicas: int


@dataclass(frozen=True, slots=True)
class Tables:
    """Costs of every option when so many groups circulate. Index [i, j]: the stage of blocks i+1 to j, inf where it is
    empty or does not fit."""

    groups: int
    seconds: tuple[F64, ...]
    """Of a group, by option: [N+1, N+1]."""
    sums: tuple[F64, ...]
    """Of blocks 1 to i at index i, by option: what `seconds` are differences of."""
    hops: F64
    """Seconds of a hop with a group's rows behind block i, at index i, from kind to kind: [N+1, kinds, kinds]. The
    first and the last are no borders and stay unused."""
    backs: F64
    """Of the tokens' way back, from the kind of the last stage to that of the first."""

    @property
    def starts(self) -> list[int | None]:
        """The kinds of first stages that must be told apart, as the way back differs; None stands for any."""
        return [None] if np.all(self.backs == self.backs[0, 0]) else list(range(len(self.backs)))

    def least_seconds(self, stages: int) -> float:
        """No way through so many stages takes less: every block where it is fastest, every hop the shortest."""
        each = np.min([np.diff(sums) for sums in self.sums], axis=0).sum()
        if stages == 1:
            return float(each)
        return float(each + (stages - 1) * self.hops[1:-1].min() + self.backs.min())


@dataclass(frozen=True)
class Space:
    """Of one problem. `kinds` devices by kind, those of a kind in the fleet's order."""

    problem: Problem
    kinds: tuple[tuple[Device, ...], ...]

    @classmethod
    def of(cls, problem: Problem, *, roomiest: bool = False) -> "Space":
        """Every device that may be used, by kind. Of those that share cores the fastest, or the one with most room."""
        kinds: dict[tuple[object, ...], list[Device]] = defaultdict(list)
        devices = _own_resources(problem, roomiest=roomiest)
        alike = _alike_hosts(problem.fleet, devices)
        for device in devices:
            kinds[_kind(problem, device, alike)].append(device)
        return cls(problem, tuple(tuple(devices) for devices in kinds.values()))

    @property
    def requests(self) -> int:
        """At once, for which the plan is made."""
        return 1 if self.problem.objective == "latency" else self.problem.promise.requests

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """Replicas serve different requests: no more of them than there are requests, and one where latency counts."""
        return tuple(
            Option(kind, replicas)
            for kind, devices in enumerate(self.kinds)
            for replicas in range(1, min(len(devices), self.requests) + 1)
        )

    @property
    def most_stages(self) -> int:
        return min(self.problem.blocks, sum(map(len, self.kinds)))

    def groups(self, stages: int) -> int:
        """So many groups circulate in a route of so many stages, each on devices of its own."""
        return min(stages, self.requests)

    def tables(self, groups: int) -> Tables:
        """Costs when so many groups circulate."""
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
        """Of so many bytes from kind to kind; within a kind between two of its devices."""
        costs, fleet = self.problem.costs, self.problem.fleet
        return np.array([[costs.hop_seconds(fleet, a[0], b[-1], size) for b in self.kinds] for a in self.kinds])

    @cached_property
    def _fits(self) -> dict[Option, NDArray[np.bool_]]:
        """[i, j] of each option: a stage of blocks i+1 to j is not empty and has room on one device of it."""
        problem, order = self.problem, np.arange(self.problem.blocks + 1)
        found: dict[Option, NDArray[np.bool_]] = {}
        for option in self.options:
            fits = order[:, None] < order[None, :]
            device = self.kinds[option.kind][0]
            memory = problem.room_of(device)
            if memory is not None:
                needed = np.array([problem.bytes_of(1, int(last), device, option.replicas) for last in order])
                fits &= needed[None, :] - needed[:, None] <= memory
            found[option] = fits
        return found


def _own_resources(problem: Problem, *, roomiest: bool) -> list[Device]:
    """The devices, of those that share cores only one."""

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
    return (
        device.device_class, problem.room_of(device), device.speed, device.bytes_per_second,
        device.operations_per_second, alike[device.host],
    )  # fmt: skip


def _alike_hosts(fleet: Fleet, devices: Sequence[Device]) -> dict[str, str]:
    """For every host one that stands for all those with which it could change places, and no hop would change: hosts
    of a single device with equal links to all others, or hosts without any link."""
    linked = {host for link in fleet.links if link.seconds or link.seconds_per_byte for host in link.between}
    count = Counter(device.host for device in devices)

    def hop(a: str, b: str) -> tuple[float, float]:
        link = fleet.link(a, b)
        return (link.seconds, link.seconds_per_byte) if link else (0.0, 0.0)

    def alike(a: str, b: str) -> bool:
        if count[a] > 1 or count[b] > 1:
            return False
        return all(hop(a, other) == hop(b, other) for other in linked - {a, b})

    found: dict[str, str] = {}
    for host in count:
        if host not in linked:
            found[host] = ""
        else:
            found[host] = next((known for known in found if known in linked and alike(known, host)), host)
    return found
