"""Compares the times that workers measured with those of the profile. Pure.

A time of the profile is multiplied by the factor of the worker's process, and by that of the block. Both cannot be told
apart where each block runs in one process: the blocks that are all alike, the layers in the middle, give the factors of
processes, and the others (the first one, the head) what is left. Where a process has none that are alike, its others
keep their factors, and it takes the change: machines change, blocks do not.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from blockrelay.planning.devices import Device
from blockrelay.protocol.plan import CPU, WorkerInfo
from blockrelay_scheduler.planning.cost_model import CostModel
from blockrelay_scheduler.policy import GUESSED_BYTES_PER_SECOND, GUESSED_OPERATIONS_PER_SECOND
from blockrelay_scheduler.replanning.measured_profile import MeasuredProfile, rounded

#: Weight of a new measurement in a factor: with one each three seconds, two thirds of a change are known after ten.
SMOOTHING = 0.3


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of a block on a device, by the profile and as measured, in the same steps."""

    predicted: float
    observed: float


def process_of(worker: WorkerInfo) -> str:
    """Returns a name for the worker's process that outlives its registration."""
    return worker.id.rpartition(":")[0] or worker.id


def device_of(worker: WorkerInfo, *, host: str, factor: float = 1.0) -> Device:
    """Returns a worker's process as a device for the cost model, on `host`; `factor` of its times, as measured.

    A class that the profile lacks has guessed figures: measurements correct them.
    """
    return Device(
        id=process_of(worker),
        device_class="CPU" if worker.device == CPU else "GPU",
        host=host,
        speed=1 / factor,
        bytes_per_second=GUESSED_BYTES_PER_SECOND,
        operations_per_second=GUESSED_OPERATIONS_PER_SECOND,
    )


def comparisons(costs: CostModel, worker: WorkerInfo) -> dict[int, Comparison]:
    """Returns the comparison of each block of a worker, by number; empty if it has not measured its present blocks.

    `costs` are without corrections.
    """
    times = worker.block_times
    if times is None or times.first != worker.first or len(times.seconds) != worker.last - worker.first + 1:
        return {}
    device = device_of(worker, host=worker.host)
    predicted = costs.each_block_seconds(device, times.rows, times.context)
    return {
        number: Comparison(predicted[number - 1], observed)
        for number, observed in enumerate(times.seconds, times.first)
        if predicted[number - 1] > 0
    }


def corrected(costs: CostModel, workers: Sequence[WorkerInfo], before: MeasuredProfile) -> MeasuredProfile:
    """Returns the record with smoothed factors that the workers' times give; what was not measured keeps its factor.

    Processes that have no worker any more leave it. `costs` are without corrections.
    """
    kinds = [repr(replace(block, index=0)) for block in costs.analysis.blocks]
    usual, _ = Counter(kinds).most_common(1)[0]
    odd = {number for number, kind in enumerate(kinds, 1) if kind != usual}
    seen = {worker.id: comparisons(costs, worker) for worker in workers}
    layers = {name: [one for number, one in found.items() if number not in odd] for name, found in seen.items()}
    processes: dict[str, float] = {}
    for worker in workers:
        name = process_of(worker)
        others = [_times(one, before.blocks.get(number, 1.0)) for number, one in seen[worker.id].items()]
        measured, known = _ratio(layers[worker.id]) or _ratio(others), before.processes.get(name)
        processes[name] = processes.get(name) or _smoothed(known, measured) or 1.0
    left: Mapping[int, list[Comparison]] = defaultdict(list)
    for worker in (worker for worker in workers if layers[worker.id]):
        for number in odd & seen[worker.id].keys():
            left[number].append(_times(seen[worker.id][number], processes[process_of(worker)]))
    blocks = {number: _smoothed(before.blocks.get(number), _ratio(found)) or 1.0 for number, found in left.items()}
    kept = {number: one for number, one in before.blocks.items() if number in odd}
    return replace(
        before,
        processes={name: rounded(one) for name, one in sorted(processes.items())},
        blocks={number: rounded(one) for number, one in sorted({**kept, **blocks}.items())},
    )


def _times(one: Comparison, factor: float) -> Comparison:
    """Returns a comparison with a profile that is `factor` times as slow."""
    return Comparison(one.predicted * factor, one.observed)


def _smoothed(known: float | None, measured: float | None) -> float | None:
    """Returns a factor between the known one and the one that was measured now; either may be missing."""
    if known is None or measured is None:
        return measured or known
    return known + SMOOTHING * (measured - known)


def _ratio(found: Sequence[Comparison]) -> float | None:
    """Returns the seconds measured for one second of the profile; None if nothing was measured."""
    predicted, observed = sum(one.predicted for one in found), sum(one.observed for one in found)
    return observed / predicted if predicted > 0 and observed > 0 else None
