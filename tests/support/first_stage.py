"""A first stage as the engine sees it, on real pages and a real Redis, without executor or threads."""

import threading

import numpy as np
import redis
from prometheus_client import CollectorRegistry

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability.metrics import WorkerMetrics
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay.redis.client import Scripts
from blockrelay.redis.errors import RedisWatch
from blockrelay_worker.engine.runs import Run, RunTable
from blockrelay_worker.engine.work import Work
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.kv.pool import PagePool
from blockrelay_worker.scheduling.first_stage import KnownRows
from blockrelay_worker.scheduling.micro_batches import Groups
from blockrelay_worker.scheduling.step_cost import StepCost
from blockrelay_worker.transport.redis_links import Links
from blockrelay_worker.transport.stage_sender import Sender
from tests.support.cell import Cell
from tests.support.stage_role import stage_role


class Stage:
    """A first stage over blocks 1 to `last` and what it needs; workers a and b are its route."""

    def __init__(
        self, folder: BlockFolder, client: redis.Redis, keys: Keys, scripts: Scripts, *, last: int, pages: int = 50
    ) -> None:
        cell, metrics = Cell(client, keys, scripts), WorkerMetrics(CollectorRegistry())
        self.route = tuple(cell.worker(name, stage=stage) for stage, name in enumerate("ab"))
        for worker in self.route:
            client.hset(keys.worker(worker), mapping={"node": "host", "cores": 2, "threads": 1})
        links = Links(client, client, keys, scripts, RedisWatch(metrics.redis_errors), threading.Event())
        self.role = stage_role(folder, "a", split="1-2,3-5", stage=0, first=1, last=last)
        self.iteration = 0
        self.table = RunTable(PagePool(StageExecutor.layout_of(folder, 1, last), pages))
        self.known = KnownRows(self.role, self.table, Sender(self.role, links, metrics), Groups(links), metrics)

    def run(self, name: str, tokens: list[int], *, computed: int, **more: object) -> Run:
        run = Run(
            request=name, run=name, route=self.route, seed=0, tokens=list(tokens), computed=computed,
            params=SamplingParams(max_tokens=100, temperature=0),
            body=RequestBody(prompt=np.array(tokens, np.int32), params={}, **more),  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        self.table.add(run)
        assert self.table.grow(run, computed)
        return run

    def step(self, cost: StepCost | None = None) -> list[Work]:
        """Take a batch and note it as computed, as the engine does."""
        work = self.known.take(cost or StepCost())
        self.iteration += 1
        for item in work:
            item.run.computed, item.run.served = item.known_end, self.iteration
        return work
