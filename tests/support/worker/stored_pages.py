"""A worker's pool, run table and page store without an engine: it computes pages whose content is known."""

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay_worker.execution.cpu.page_memory import PageMemory
from blockrelay_worker.execution.page_layout import PageLayout
from blockrelay_worker.kv.prefix_cache import PrefixCache
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.kv.store.file_tier import FileTier
from blockrelay_worker.kv.store.record import PageShape
from blockrelay_worker.kv.store.store import PageStore
from blockrelay_worker.kv.store.tier import Tier
from blockrelay_worker.runs.kv_load import Loaded
from blockrelay_worker.runs.run import Run
from tests.support.worker.runs import new_run

LAYOUT = PageLayout(layers=3, kv_heads=2, head_dim=8)
SHAPE = PageShape(2, 8, np.float16)
PROMPT = list(range(70))  # four full pages and six tokens


class Worker:
    """A worker's pool, run table and store over one folder; it computes a page as numbers made of its tokens."""

    def __init__(
        self,
        folder: Path,
        *,
        pages: int = 20,
        slow: Callable[[Tier], Tier] = lambda tier: tier,
        swap: Path | None = None,
        swapped_pages: int = 100,
    ) -> None:
        self.registry = CollectorRegistry()
        metrics = WorkerMetrics(self.registry)
        self.memory = PageMemory(LAYOUT, pages)
        self.pool = self.memory.pool
        tier = FileTier(folder, limit=1 << 20, record_bytes=SHAPE.record_bytes, trouble=lambda kind: None)
        self.trouble: list[str] = []
        tiers = [slow(tier)] if swap is None else []
        disk = swap and FileTier(
            swap,
            label="swap",
            limit=swapped_pages * LAYOUT.layers * SHAPE.record_bytes,
            record_bytes=SHAPE.record_bytes,
            trouble=self.trouble.append,
            blocks=range(1, 4),
            swap=True,
        )
        self.store = PageStore(self.memory, tiers, first_block=1, metrics=metrics, swap=disk)
        self.mail: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        cache = PrefixCache(
            self.pool, model_hash="m", numerics="n", metrics=metrics, store=self.store, deliver=self.mail.put
        )
        self.table = RunTable(self.pool, cache)
        self._count = 0

    def run(self, prompt: list[int], *, request_id: str = "", **more: Any) -> Run:
        self._count += 1
        run = new_run(request_id or f"req-{self._count}", prompt, **more)
        self.table.add(run)
        self.table.attach_prefix(run)
        return run

    def loaded(self) -> None:
        self.table.loaded(self.mail.get(timeout=10))

    def found(self) -> Run:
        """A run of PROMPT with the pages that the store has."""
        run = self.run(PROMPT)
        self.loaded()
        return run

    def compute(self, run: Run) -> None:
        end = len(run.tokens)
        assert self.table.grow(run, end)
        for position in range(run.computed, end):
            for layer in range(LAYOUT.layers):
                self.memory.k_pages[layer][run.pages[position // 16], :, :, position % 16] = run.tokens[position]
                self.memory.v_pages[layer][run.pages[position // 16], :, position % 16] = run.tokens[position] + layer
        run.tokens_computed(end)
        self.table.publish(run)

    def content(self, run: Run, tokens: int) -> list[list[float]]:
        """First key and value of each position and layer."""
        return [
            [
                float(half)
                for layer in range(LAYOUT.layers)
                for half in (
                    self.memory.k_pages[layer][run.pages[p // 16], 0, 0, p % 16],
                    self.memory.v_pages[layer][run.pages[p // 16], 0, p % 16, 0],
                )
            ]
            for p in range(tokens)
        ]

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"blockrelay_worker_{name}_total", labels) or 0


@contextmanager
def working(folder: Path, **more: Any) -> Iterator[Worker]:
    worker = Worker(folder, **more)
    try:
        yield worker
    finally:
        worker.table.clear()
        worker.table.check_integrity()
        worker.store.close()


def numbers(tokens: int) -> list[list[float]]:
    """What `Worker.content` says of tokens 0, 1, 2, ... that `Worker.compute` has computed."""
    return [[float(token + part) for layer in range(3) for part in (0, layer)] for token in range(tokens)]
