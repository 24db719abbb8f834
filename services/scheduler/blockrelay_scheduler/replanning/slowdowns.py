"""How many times as long stages take on the CPUs that stand in for GPUs: predicted, and published for the scripts.

A request may limit this (`fallback: {"max_slowdown": 2.0}`). RERUN and DEAD read the prediction when a GPU fails.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from blockrelay.errors import WireError
from blockrelay.observability import logs
from blockrelay.planning.profile import BASE_CONTEXT
from blockrelay.protocol.encoding.checks import reading
from blockrelay.protocol.plan import GPU, WorkerInfo
from blockrelay.protocol.transitions import calls
from blockrelay_scheduler.link import SchedulerLinks
from blockrelay_scheduler.planning.cost_model import CostModel
from blockrelay_scheduler.policy import SLOWDOWN_CHANGE
from blockrelay_scheduler.replanning import measured_profile
from blockrelay_scheduler.replanning.corrections import comparisons, device_of, process_of
from blockrelay_scheduler.replanning.measured_profile import MeasuredProfile


def slowdowns(costs: CostModel, workers: Sequence[WorkerInfo], measured: MeasuredProfile) -> dict[str, float]:
    """Returns the predicted seconds on a CPU for one on a GPU, by first and last block of a stage, `3-5`. Pure.

    A stage is left out without a GPU worker, without a CPU worker that would be given its requests, and where one of
    both has neither measured its blocks nor is in the profile. Of several the slowest CPU and the fastest GPU count.
    Both are compared in steps as the GPU has them, or else the CPU. `costs` are without corrections.
    """
    by_stage: dict[tuple[int, int], list[WorkerInfo]] = defaultdict(list)
    for worker in workers:
        if worker.stage is not None:
            by_stage[worker.first, worker.last].append(worker)
    found: dict[str, float] = {}
    for (first, last), on in sorted(by_stage.items()):
        gpus = [worker for worker in on if worker.device == GPU]
        cpus = [worker for worker in on if worker.device != GPU and worker.state == "ready"]
        rows, context = _steps_of([*gpus, *cpus])
        on_gpus, on_cpus = (
            [each for one in kind if (each := _seconds(costs, one, measured, rows, context))] for kind in (gpus, cpus)
        )
        if on_gpus and on_cpus:
            found[f"{first}-{last}"] = float(f"{max(on_cpus) / min(on_gpus):.4g}")
    return found


def is_news(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    """Returns whether slowdowns differ by enough from those that were published `before`."""
    if before.keys() != now.keys():
        return True
    return any(abs(now[stage] - ratio) > SLOWDOWN_CHANGE * ratio for stage, ratio in before.items())


def _steps_of(workers: Sequence[WorkerInfo]) -> tuple[float, float]:
    """Returns the rows and the context of the steps of the first of `workers` that has measured itself."""
    times = next((worker.block_times for worker in workers if worker.block_times), None)
    return (times.rows, times.context) if times else (1.0, float(BASE_CONTEXT))


def _seconds(
    costs: CostModel, worker: WorkerInfo, measured: MeasuredProfile, rows: float, context: float
) -> float | None:
    """Returns the seconds of a step of a worker's blocks; None if nothing says them.

    A measured step is scaled to `rows` and `context` as the profile, or the roofline of a guess, says.
    """
    times, device = worker.block_times, device_of(worker, host=worker.host)
    seen = comparisons(costs, worker).values()
    if times and seen:
        scale = costs.seconds(device, worker.first, worker.last, rows, context) / sum(one.predicted for one in seen)
        return scale * sum(one.observed for one in seen)
    if not costs.is_profiled(device):
        return None
    device = replace(device, speed=1 / measured.processes.get(process_of(worker), 1.0))
    corrected = replace(costs, corrections=measured.blocks)
    return corrected.seconds(device, worker.first, worker.last, rows, context)


@dataclass(slots=True)
class SlowdownPublisher:
    """Publishes the predicted slowdowns of one model, beside any number of other schedulers. One thread calls it."""

    link: SchedulerLinks
    model: str
    """The model's key in Redis."""
    costs: CostModel
    """The times of the profile, without corrections."""

    def publish(self, workers: Sequence[WorkerInfo]) -> None:
        """Publishes the slowdowns of the present `workers` if they differ from the published ones by enough.

        Raises RedisTrouble.
        """
        client, keys = self.link.client, self.link.keys
        told = cast(Any, client.hget(keys.plan(self.model), "slowdowns"))
        record = measured_profile.decode(measured_profile.read(client, keys, self.model)) or MeasuredProfile()
        now, before = slowdowns(self.costs, workers, record), _published(told)
        if is_news(before, now):
            self.link.scripts.run(calls.publish_slowdowns(self.model, now))
            logs.get().info("SLOWDOWNS_PREDICTED", slowdowns=now)


def _published(told: bytes | None) -> dict[str, float]:
    """Returns the slowdowns in the plan's record, empty where there are none, or damaged ones."""
    try:
        with reading("slowdowns"):
            ratios = cast(dict[str, float], json.loads(told)) if told else {}
            return {stage: ratio for stage, ratio in ratios.items() if ratio > 0 and math.isfinite(ratio)}
    except WireError:
        return {}  # they are published again
