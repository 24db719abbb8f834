"""A whole system under a load, and what its clients see of it."""

import random
from dataclasses import dataclass

from bench.simulate.cell import Cell, Route, Worker
from bench.simulate.clock import Clock, Host, Process
from bench.simulate.costs import Costs
from bench.simulate.load import Asked, Figures, Load, figures
from blockrelay_gateway.cells.placement import offers


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """`workers` of a cell serve all blocks each, or `stages` of them together. On one host all processes share its
    cores; else each has what it needs, and a gateway for each cell."""

    cells: int = 1
    workers: int = 1
    stages: int = 1
    groups: int = 1
    one_host: bool = True

    def __post_init__(self) -> None:
        assert self.workers % self.stages == 0, "each route has a worker for every stage"


@dataclass(frozen=True, slots=True)
class Seen:
    """What clients saw behind the warm-up. `busy`: share of the time in which a process computed (Redis: or waited for
    its disk), the busiest of each kind."""

    figures: Figures
    busy: dict[str, float]


def simulate(setup: Setup, load: Load, costs: Costs, *, seconds: float, warm_up: float = 0.0, seed: int = 0) -> Seen:
    """`seconds` of it behind a warm-up."""
    clock, chance = Clock(), random.Random(seed)
    shared = Host(clock, costs.speeds, costs.turn)
    until = warm_up + seconds
    every: list[Asked] = []

    def host() -> Host:
        return shared if setup.one_host else Host(clock, (1.0,))

    def heard(asked: Asked) -> None:
        if load.clients and len(asked.tokens) == asked.new:
            clock.at(asked.tokens[-1], send)

    def worker() -> Worker:
        own = shared if setup.one_host else Host(clock, (1.0, 2.0))
        return Worker(Process(own), Process(own))

    gateways = [Process(host()) for _ in range(1 if setup.one_host else setup.cells)]
    clients = Process(host())
    cells: dict[str, Cell] = {}
    workers: list[Worker] = []
    for index in range(setup.cells):
        gateway = gateways[index % len(gateways)]
        cell = Cell(clock, costs, redis=host(), gateway=gateway, clients=clients, heard=heard)
        for _ in range(setup.workers // setup.stages):
            stages = [worker() for _ in range(setup.stages)]
            workers += stages
            cell.routes.append(Route(cell, stages, setup.groups))
        cells[f"c{index}"] = cell
    if setup.one_host:
        for one in workers:
            one.neighbours += [other for other in workers if other is not one]
    weights = dict.fromkeys(cells, 1)

    def send() -> None:
        asked = Asked(load.prompt.draw(chance), load.new.draw(chance), clock.now)
        every.append(asked)
        loads = {name: cell.unfinished for name, cell in cells.items()}
        cells[offers(None, weights, loads, (), chance=chance).order[0]].send(asked)

    for _ in range(load.clients):
        clock.at(0.0, send)
    for moment in load.arrivals(chance, until):
        clock.at(moment, send)
    clock.run(until)

    return Seen(
        figures(every, warm_up, until),
        {
            "worker": max(one.kernels.work_s for one in workers) / until,
            "control Redis": max(cell.redis.busy_s for cell in cells.values()) / until,
            "gateway": max(one.work_s for one in gateways) / until,
        },
    )
