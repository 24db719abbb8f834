"""Simulates a whole system under a load, and returns the figures that its clients see."""

import random
from dataclasses import dataclass

from bench.simulate.cell import Cell, Route, Worker
from bench.simulate.clock import Clock, Host, Process
from bench.simulate.costs import Costs
from bench.simulate.load import ClientRequest, Figures, Load, figures
from blockrelay_gateway.cells.placement import offers


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The size of a system."""

    cells: int = 1
    workers: int = 1
    """Workers of each cell, a multiple of `stages`."""
    stages: int = 1
    groups: int = 1
    """Batches that each route has in flight."""
    one_host: bool = True
    """True: all processes share the cores of one host, with one gateway. False: each process has cores of its own, and
    each cell a gateway."""

    def __post_init__(self) -> None:
        assert self.workers % self.stages == 0, "each route has a worker for every stage"


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulation."""

    figures: Figures
    """What clients saw after the warm-up."""
    busy: dict[str, float]
    """Share of the time in which the busiest process of each kind computed, or a Redis waited for its disk."""


def simulate(
    setup: Setup, load: Load, costs: Costs, *, seconds: float, warm_up: float = 0.0, seed: int = 0
) -> Simulated:
    """Simulates `seconds` of a load on a system, after `warm_up` seconds that do not count in the figures.

    The same `seed` gives the same result.
    """
    clock, chance = Clock(), random.Random(seed)
    shared = Host(clock, costs.speeds, costs.turn)
    until = warm_up + seconds
    every: list[ClientRequest] = []

    def host() -> Host:
        return shared if setup.one_host else Host(clock, (1.0,))

    def heard(request: ClientRequest) -> None:
        if load.clients and len(request.tokens) == request.new:
            clock.at(request.tokens[-1], send)

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
        request = ClientRequest(load.prompt.draw(chance), load.new.draw(chance), clock.now)
        every.append(request)
        loads = {name: cell.unfinished for name, cell in cells.items()}
        cells[offers(None, weights, loads, (), chance=chance).order[0]].send(request)

    for _ in range(load.clients):
        clock.at(0.0, send)
    for moment in load.arrivals(chance, until):
        clock.at(moment, send)
    clock.run(until)

    return Simulated(
        figures(every, warm_up, until),
        {
            "worker": max(one.kernels.work_s for one in workers) / until,
            "control Redis": max(cell.redis.busy_s for cell in cells.values()) / until,
            "gateway": max(one.work_s for one in gateways) / until,
        },
    )
