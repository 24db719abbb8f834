"""A real engine on a real Redis, in threads of the test, around an executor that may be broken."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis
from prometheus_client import CollectorRegistry

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import EndEntry
from blockrelay.protocol.plan import Device
from blockrelay.redis.client import Scripts
from blockrelay.redis.errors import RedisWatch
from blockrelay_worker.engine.loop import Engine
from blockrelay_worker.engine.mailbox import Mailbox
from blockrelay_worker.engine.run_table import RunTable
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.process.care import DeviceCare
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.transport.inbox_reader import Reader
from blockrelay_worker.transport.redis_links import Links
from tests.support.cell import MODEL, Cell
from tests.support.worker.machines import idle_machine
from tests.support.worker.stage_role import stage_role

Break = Callable[[Executor], Executor]


@contextmanager
def engine_running(
    folder: BlockFolder,
    client: redis.Redis,
    keys: Keys,
    scripts: Scripts,
    *,
    broken: Break,
    device: Device = "cpu",
    registry: CollectorRegistry | None = None,
    care: Callable[[WorkerMetrics], DeviceCare] | None = None,
) -> Iterator[tuple[Cell, RunTable]]:
    """One worker that runs the whole model; a cell to talk to it."""
    cell, stop = Cell(client, keys, scripts), threading.Event()
    last = folder.model.blocks
    client.delete(keys.worker("w"))  # of a life before, which may have been about to leave
    name = cell.worker("w", split=f"1-{last}", device=device)
    executor = broken(StageExecutor(folder, 1, last, pages=100, threads=1, kernels=load_kernels(1)))
    metrics, mailbox, table = WorkerMetrics(registry or CollectorRegistry()), Mailbox(), RunTable(executor.pool)
    links = Links(client, client, keys, scripts, RedisWatch(metrics.redis_errors), stop)
    runs_on = "gpu" if device == "gpu" else "cpu"
    role = stage_role(folder, name, split=f"1-{last}", stage=0, first=1, last=last, device=runs_on, step_target_s=1.0)
    engine = Engine(
        role,
        folder.model,
        None,
        executor,
        table,
        links,
        mailbox,
        metrics,
        idle_machine(),
        care(metrics) if care else None,
    )
    streams = [f(MODEL, c) for c in ("cpu", "gpu") for f in (keys.reruns, keys.jobs)]
    threads = [
        Reader(client, keys.inbox(name), streams, mailbox, stop, links.watch),
        threading.Thread(target=engine.run),
    ]
    for thread in threads:
        thread.start()
    try:
        yield cell, table
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
        table.check_integrity()


def end_of(cell: Cell, request: str) -> EndEntry | None:
    log = cell.log(request)
    return log[-1] if log and isinstance(log[-1], EndEntry) else None
