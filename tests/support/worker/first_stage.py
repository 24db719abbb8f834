"""A first stage as the engine sees it, on real pages and a real Redis, without executor or threads."""

from typing import Any

from prometheus_client import CollectorRegistry

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay_worker.execution.page_layout import layout_of
from blockrelay_worker.execution.page_pool import PagePool
from blockrelay_worker.kv.prefix_cache import PrefixCache
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.runs.run import Run
from blockrelay_worker.scheduling.first_stage import FirstStageBatcher
from blockrelay_worker.scheduling.guesses import Guesser
from blockrelay_worker.scheduling.route_members import RouteMembers
from blockrelay_worker.scheduling.step_cost import StepCost
from blockrelay_worker.scheduling.work import Work
from blockrelay_worker.transport.stage_sender import StageSender
from tests.support.cell import Cell
from tests.support.worker.links import links_of
from tests.support.worker.runs import new_run
from tests.support.worker.stage_role import stage_role


class Stage:
    """A first stage over blocks 1 to `last` and what it needs; workers a and b are its route.

    `cached`: new runs find the pages of others.
    """

    def __init__(
        self,
        folder: BlockFolder,
        cell: Cell,
        *,
        last: int,
        pages: int = 50,
        guesser: Guesser | None = None,
        cached: bool = False,
        max_rows: int = 64,
    ) -> None:
        client, keys, metrics = cell.client, cell.keys, WorkerMetrics(CollectorRegistry())
        self.route = tuple(cell.worker(name, stage=stage) for stage, name in enumerate("ab"))
        for worker_id in self.route:
            client.hset(keys.worker(worker_id), mapping={"node": "host", "cores": 2, "threads": 1})
        links = links_of(cell, metrics=metrics)
        self.role = stage_role(folder, "a", split="1-2,3-5", stage=0, first=1, last=last, max_rows=max_rows)
        self.iteration = 0
        pool = PagePool(layout_of(folder, 1, last), pages)
        cache = PrefixCache(pool, model_hash="m", numerics="n", metrics=metrics) if cached else None
        self.table = RunTable(pool, cache)
        self.batcher = FirstStageBatcher(
            self.role.limits,
            self.table,
            RouteMembers(links.read_worker, self.role.limits),
            StageSender(links, metrics).full_targets,
            metrics,
            whole_model=self.role.last_stage,
            guesser=guesser,
        )

    def run(
        self, name: str, tokens: list[int], *, computed: int, route: tuple[str, ...] | None = None, **more: Any
    ) -> Run:
        run = new_run(name, tokens, route=route or self.route, **more)
        self.table.add(run)
        if computed:
            assert self.table.grow(run, computed)
            run.tokens_computed(computed)
        else:
            self.table.attach_prefix(run)
        return run

    def step(self, cost: StepCost | None = None) -> list[Work]:
        """Take a batch and note it as computed, as the engine does."""
        work = self.batcher.take(cost or StepCost())
        self.iteration += 1
        for item in work:
            item.run.tokens_computed(item.known_end)
            item.run.last_step = self.iteration
            self.table.publish(item.run, item.known_end)
        return work
