"""How many workers the unfinished requests call for: a function of what Redis says, for an autoscaler to follow.

A route is one worker for each stage; a request runs on one. Wanted are as many routes as it takes to be done within
`target_s`, by the pace that the workers have measured themselves at, and

- none while nothing is unfinished, one at least while something is, and no more than there are requests;
- no fewer than hold the KV pages in use: what runs on a worker that is taken away goes on where there is room;
- one worker more than the stages (`spare`) while there is one route: the death of a worker then costs no wait;
- fewer than there are only when SCALE_DOWN_SLACK times the work would still be done in time: a load that wavers
  starts nothing.

The number is one of workers, not a change: those that load already are among them, so that nobody is started twice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockrelay.protocol.plan import Device, Plan, WorkerInfo, parse_split
from blockrelay_scheduler.policy import SCALE_DOWN_SLACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Outstanding:
    """What the unfinished requests still cost: prompt `rows` that nobody has computed, `tokens` that may follow."""

    rows: int
    tokens: int

    @classmethod
    def from_redis(cls, fields: Mapping[bytes, bytes]) -> "Outstanding":
        """From `HGETALL outstanding:<model>`."""
        rows, tokens = (
            sum(int(fields.get(state + what, 0)) for state in (b"queued", b"running"))
            for what in (b"_rows", b"_tokens")
        )
        return cls(rows=rows, tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """`unfinished` requests; `route_s` seconds of work for a single route, None before any worker has measured itself;
    `routes` there are, those that still load included, each of which runs `slots` requests at once; `held` of them,
    as a fraction, would have all their KV pages in use."""

    unfinished: int
    route_s: float | None
    routes: int
    slots: int
    held: float


def route_seconds(outstanding: Outstanding, workers: Sequence[WorkerInfo]) -> float | None:
    """Seconds that a route of average speed takes for all of it; None before a worker has measured itself."""
    paces = [w.pace for w in workers if w.is_alive and w.stage == 0 and w.pace]
    if not paces:
        return None
    row_s = len(paces) / sum(1 / pace.row_s for pace in paces)
    token_s = len(paces) / sum(1 / pace.token_s for pace in paces)
    return outstanding.rows * row_s + outstanding.tokens * token_s


def demand(unfinished: int, outstanding: Outstanding, workers: Sequence[WorkerInfo], plan: Plan) -> Demand:
    """Of a cell with these workers under this plan."""
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
    """How many routes, by the rules above. Never falls when `unfinished`, `route_s` or `held` rises."""
    if not demand.unfinished:
        return 0

    def needed(slack: float) -> int:
        if demand.route_s is None:  # as many as run them all at once, once it is known how many one runs
            by_time = math.ceil(slack * demand.unfinished / demand.slots) if demand.slots else 1
        else:
            by_time = math.ceil(slack * demand.route_s / target_s)
        return max(1, math.ceil(demand.held), min(by_time, demand.unfinished))

    return max(needed(1.0), min(demand.routes, needed(SCALE_DOWN_SLACK)))


def workers_wanted(
    demand: Demand, workers: Sequence[WorkerInfo], plan: Plan, *, target_s: float, spare: int
) -> dict[Device, int]:
    """The number of workers that are wanted, by class of device. A stage is a GPU's while one has it or loads it. The
    spare one is of the class that people have more of: a CPU, where a stage is theirs."""
    gpus = [worker.id for worker in workers if worker.device == "gpu" and not worker.draining]
    on_gpus = len({plan.assignments[gpu] for gpu in gpus if gpu in plan.assignments})
    stages: dict[Device, int] = {"cpu": len(parse_split(plan.split)) - on_gpus, "gpu": on_gpus}
    routes = routes_wanted(demand, target_s=target_s)
    if not routes:
        return {"cpu": 0, "gpu": 0}
    spared: Device = "cpu" if stages["cpu"] else "gpu"
    return {device: max(routes * count, count + (spare if device == spared else 0)) for device, count in stages.items()}
