"""The number of workers that the unfinished requests need, for an autoscaler to follow. Pure: data from Redis in.

A route is one worker for each stage, and each request runs on one route. Enough routes are wanted to finish all
requests within `target_s`, at the pace that the workers measured on themselves. Besides:

- no route is wanted without unfinished requests, else at least one;
- the work alone never needs more routes than there are unfinished requests;
- before a worker has measured its pace, as many routes are wanted as run all requests at once;
- never fewer routes than hold the KV pages in use: the requests of a removed worker go on where there is room;
- with one route `spare` more workers are wanted than stages, so that the death of a worker costs no wait;
- the number falls only if SCALE_DOWN_SLACK times the work would still be done in time, so that a wavering load changes
  nothing.

The result is a total, not a change: it includes workers that still load, so that none is started twice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockrelay.protocol.plan import CPU, DEVICES, GPU, Device, Plan, WorkerInfo, parse_split
from blockrelay_scheduler.policy import SCALE_DOWN_SLACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Outstanding:
    """The work that is left for the unfinished requests."""

    rows: int
    """Prompt tokens that are still to be computed."""
    tokens: int
    """Tokens that may still be generated."""

    @classmethod
    def from_redis(cls, fields: Mapping[bytes, bytes]) -> "Outstanding":
        """Parses the answer of `HGETALL outstanding:<model>`."""
        rows, tokens = (
            sum(int(fields.get(state + what, 0)) for state in (b"queued", b"running"))
            for what in (b"_rows", b"_tokens")
        )
        return cls(rows=rows, tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The load of a cell and the routes that it has for it."""

    unfinished: int
    """Requests that have not ended."""
    route_s: float | None
    """Seconds that one route would need for all the work; None while no live worker of stage 0 has a measured pace."""
    routes: int
    """Routes of live workers that do not drain, including those that still load."""
    slots: int
    """Requests that one route runs at once; 0 while none is known."""
    held: float
    """Routes that the KV pages in use would fill, as a fraction."""


def route_seconds(outstanding: Outstanding, workers: Sequence[WorkerInfo]) -> float | None:
    """Returns the seconds that a route of average pace takes for all the work.

    None while no live worker of stage 0 has measured its pace.
    """
    paces = [w.pace for w in workers if w.is_alive and w.stage == 0 and w.pace]
    if not paces:
        return None
    row_s = len(paces) / sum(1 / pace.row_s for pace in paces)
    token_s = len(paces) / sum(1 / pace.token_s for pace in paces)
    return outstanding.rows * row_s + outstanding.tokens * token_s


def demand(unfinished: int, outstanding: Outstanding, workers: Sequence[WorkerInfo], plan: Plan) -> Demand:
    """Returns the demand of a cell with `unfinished` requests and these workers under this plan."""
    stages = len(parse_split(plan.split))
    serving = [w for w in workers if w.is_alive and not w.draining]
    first = [w for w in serving if w.stage == 0 and w.ready]
    pages = sum(w.pages for w in first) / len(first) if first else 0
    return Demand(
        unfinished=unfinished,
        route_s=route_seconds(outstanding, workers),
        routes=len(serving) // stages,
        slots=max((w.capabilities.max_sequences for w in first if w.capabilities), default=0),
        held=sum(w.pages_used for w in first) / pages if pages else 0.0,
    )


def routes_wanted(demand: Demand, *, target_s: float) -> int:
    """Returns the number of routes wanted, by the rules of this module.

    It never falls when `unfinished`, `route_s` or `held` rises.
    """
    if not demand.unfinished:
        return 0

    def needed(slack: float) -> int:
        if demand.route_s is None:  # without a pace: enough routes to run all requests at once
            by_time = math.ceil(slack * demand.unfinished / demand.slots) if demand.slots else 1
        else:
            by_time = math.ceil(slack * demand.route_s / target_s)
        return max(1, math.ceil(demand.held), min(by_time, demand.unfinished))

    return max(needed(1.0), min(demand.routes, needed(SCALE_DOWN_SLACK)))


def workers_wanted(
    demand: Demand, workers: Sequence[WorkerInfo], plan: Plan, *, target_s: float, spare: int
) -> dict[Device, int]:
    """Returns the number of workers wanted of each class of device; 0 of all without unfinished requests.

    There is one for each stage of each wanted route, and at least one for each stage with `spare` more. A stage counts
    as a GPU's while a GPU worker has it or loads it. The spare workers are CPUs wherever a stage is a CPU's, because
    CPUs are the more common.
    """
    gpus = [worker.id for worker in workers if worker.device == GPU and not worker.draining]
    on_gpus = len({plan.assignments[gpu] for gpu in gpus if gpu in plan.assignments})
    stages: dict[Device, int] = {CPU: len(parse_split(plan.split)) - on_gpus, GPU: on_gpus}
    routes = routes_wanted(demand, target_s=target_s)
    if not routes:
        return dict.fromkeys(DEVICES, 0)
    spare_class: Device = CPU if stages[CPU] else GPU
    return {
        device: max(routes * count, count + (spare if device == spare_class else 0)) for device, count in stages.items()
    }
