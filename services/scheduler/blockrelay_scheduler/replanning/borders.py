"""Looks for borders between the stages of a running system that make its steps shorter. Pure.

Which workers form a stage does not change, nor the order of stages: only blocks go from one stage to another.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blockrelay.errors import BlockFolderError
from blockrelay.planning.devices import Device, Fleet
from blockrelay.protocol.block_times import BESIDE_SHARE
from blockrelay.protocol.constants import PAGE_TOKENS
from blockrelay.protocol.plan import CPU, Stage, WorkerInfo, stages_of
from blockrelay_scheduler.planning.cost_model import CostModel
from blockrelay_scheduler.planning.prediction import predict
from blockrelay_scheduler.planning.problem import Part, Placement, Problem, Promise
from blockrelay_scheduler.replanning.corrections import device_of, process_of
from blockrelay_scheduler.replanning.measured_profile import MeasuredProfile

#: Halvings in the search for the shortest slowest stage: to a millionth of the whole.
_BISECTIONS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the system has to do now."""

    requests: int
    """Requests at once, at least 1."""
    context: float
    """Tokens that each token attends to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Borders:
    """Stages and the predicted seconds of a step of all requests, by the corrected profile."""

    stages: tuple[Stage, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The stages of a running system, each with its workers."""

    costs: CostModel
    """The times of the profile, without corrections."""
    measured: MeasuredProfile
    stages: tuple[Stage, ...]
    workers: tuple[tuple[WorkerInfo, ...], ...]
    """The workers of each stage; none is empty."""
    check_cut: Callable[[Sequence[Stage]], None]
    """Raises BlockFolderError for stages that the model cannot be cut into."""
    least_gain: float
    """Share of its time that a block must gain by moving, on average: differences below are noise."""

    def present(self, load: Load) -> Borders:
        """Returns the borders in force."""
        return Borders(stages=self.stages, seconds=self._seconds(self._problem(load), self.stages))

    def best(self, load: Load) -> Borders:
        """Returns the borders with the shortest steps; those in force unless others are shorter.

        From those in force, and from stages that take equally long, it moves blocks from one stage to another while
        that makes steps shorter. Borders stay where a worker cannot load another stage beside its own.
        """
        problem = self._problem(load)
        a_block_s = self.least_gain * self._seconds(problem, self.stages) / len(self.costs.analysis.blocks)

        def borders(stages: tuple[Stage, ...]) -> Borders:
            return Borders(stages=stages, seconds=self._seconds(problem, stages))

        def cost(found: Borders) -> float:
            return found.seconds + a_block_s * _moved(self.stages, found.stages)

        ends: list[Borders] = []
        for start in {self.stages, self._balanced(problem)}:
            best, better = None, borders(start) if self._is_possible(start) else None
            while better is not None and (best is None or cost(better) < cost(best)):
                best = better
                around = filter(self._is_possible, _neighbours(best.stages))
                better = min(map(borders, around), key=cost, default=None)
            ends += [best] if best else []
        return min(ends, key=cost)

    def _problem(self, load: Load) -> Problem:
        devices: dict[str, Device] = {}
        for worker in (worker for on in self.workers for worker in on):
            factor = self.measured.processes.get(process_of(worker), 1.0)
            devices[process_of(worker)] = device_of(worker, host=self._cores_of(worker), factor=factor)
        return Problem(
            analysis=self.costs.analysis,
            fleet=Fleet(devices=tuple(devices.values())),
            costs=replace(self.costs, corrections=self.measured.blocks),
            objective="throughput",
            promise=Promise(context=round(2 * load.context), requests=load.requests),
        )

    def _cores_of(self, worker: WorkerInfo) -> str:
        """Returns a name for the cores that a worker computes on: those of its machine if it has too few for all."""
        together = {
            process_of(one): one for on in self.workers for one in on if (one.node, one.device) == (worker.node, CPU)
        }
        crowded = sum(one.threads for one in together.values()) > worker.cores
        return worker.node if crowded else process_of(worker)

    def _seconds(self, problem: Problem, stages: Sequence[Stage]) -> float:
        parts = tuple(
            Part(first=stage.first, last=stage.last, devices=tuple(dict.fromkeys(map(process_of, on))), reason="")
            for stage, on in zip(stages, self.workers, strict=True)
        )
        return predict(problem, Placement(parts=parts), problem.promise.requests).seconds

    def _balanced(self, problem: Problem) -> tuple[Stage, ...]:
        """Returns stages of which the slowest is as fast as can be, by bisection on its seconds."""
        rows = max(1.0, problem.promise.requests / len(self.stages))
        devices = [problem.fleet.device(process_of(on[0])) for on in self.workers]
        sums = [problem.costs.prefix_seconds(device, rows, problem.promise.context / 2) for device in devices]
        found, low, high = self.stages, 0.0, max(table[-1] for table in sums)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            stages = _within(sums, middle)
            if stages is None:
                low = middle
            else:
                found, high = stages, middle
        return found

    def _is_possible(self, stages: Sequence[Stage]) -> bool:
        """Returns whether the workers can load these stages beside their own, and the model can be cut there.

        All workers load one, also for the same blocks: their routes are of one plan. Their new pools must hold what the
        present ones do, or a request at full context.
        """
        if stages == self.stages:
            return True
        beside: Counter[str] = Counter(worker.node for on in self.workers for worker in on)
        for stage, before, on in zip(stages, self.stages, self.workers, strict=True):
            kv = self.costs.kv_bytes_per_token(stage.first, stage.last)
            kv_before = self.costs.kv_bytes_per_token(before.first, before.last)
            for worker in on:
                if not worker.loads_beside or worker.block_times is None:
                    return False
                device = device_of(worker, host=worker.node)
                pool = worker.pages * PAGE_TOKENS * kv_before  # the new one has as many bytes
                needed = self.costs.weight_bytes(stage.first, stage.last, device) + pool
                if needed > worker.block_times.free_bytes * BESIDE_SHARE / beside[worker.node]:
                    return False
                if pool < kv * min(worker.pages * PAGE_TOKENS, self.costs.analysis.context):
                    return False
        try:
            self.check_cut(stages)
        except BlockFolderError:
            return False
        return True


def _within(sums: Sequence[Sequence[float]], limit_s: float) -> tuple[Stage, ...] | None:
    """Returns stages that take at most `limit_s` seconds each, of the first ones as many blocks as can be; or None.

    `sums` has for each stage the seconds of blocks 1 to i on its device at index i.
    """
    blocks, at, sizes = len(sums[0]) - 1, 0, list[int]()
    for index, table in enumerate(sums):
        most = blocks - (len(sums) - 1 - index)  # one block for each stage behind
        end = bisect_right(table, table[at] + limit_s, lo=at, hi=most + 1) - 1
        if end <= at:
            return None
        sizes.append(end - at)
        at = end
    return stages_of(sizes) if at == blocks else None


def _moved(before: Sequence[Stage], after: Sequence[Stage]) -> int:
    """Returns how many blocks are in another stage."""
    kept = (min(a.last, b.last) - max(a.first, b.first) + 1 for a, b in zip(before, after, strict=True))
    return before[-1].last - sum(max(0, count) for count in kept)


def _neighbours(stages: Sequence[Stage]) -> list[tuple[Stage, ...]]:
    """Returns stages that come from these by giving 1, 2, 4, 8 and so on blocks of one stage to another one."""
    sizes = [stage.last - stage.first + 1 for stage in stages]
    found: list[tuple[Stage, ...]] = []
    for giver, size in enumerate(sizes):
        for taker in (one for one in range(len(sizes)) if one != giver):
            for count in (1 << doublings for doublings in range((size - 1).bit_length())):
                moved = list(sizes)
                moved[giver], moved[taker] = size - count, sizes[taker] + count
                found.append(stages_of(moved))
    return found
