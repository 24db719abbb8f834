"""A real engine on a real Redis, in threads of the test, around an executor that may be broken."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.messages import EndEntry
from blockrelay.protocol.plan import Device, parse_split
from blockrelay_worker.engine.loop import Engine
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.executor import Executor
from blockrelay_worker.execution.process.care import DeviceCare
from blockrelay_worker.kernels import load_kernels
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.sampling.row_sampler import sampler_of
from blockrelay_worker.transport.events import Event
from blockrelay_worker.transport.inbox_reader import Reader
from blockrelay_worker.transport.mailbox import Mailbox
from tests.support.cell import MODEL, Cell
from tests.support.worker.links import links_of
from tests.support.worker.machines import idle_machine
from tests.support.worker.stage_role import stage_role

Break = Callable[[Executor], Executor]


@contextmanager
def engine_running(
    folder: BlockFolder,
    cell: Cell,
    *,
    broken: Break,
    device: Device = "cpu",
    registry: CollectorRegistry | None = None,
    care: Callable[[WorkerMetrics], DeviceCare] | None = None,
) -> Iterator[RunTable]:
    """One worker that runs the whole model."""
    split = f"1-{folder.model.blocks}"
    metrics = WorkerMetrics(registry or CollectorRegistry())
    with _stage(folder, cell, split, 0, "w", broken, metrics, device=device, care=care) as table:
        yield table


@contextmanager
def stages_running(
    folder: BlockFolder,
    cell: Cell,
    *,
    split: str,
    broken: Break,
    registries: Sequence[CollectorRegistry] = (),
    **role: Any,
) -> Iterator[list[RunTable]]:
    """A worker for each stage of `split`, in its order; rows go through Redis. `role`: more of each one's."""
    with ExitStack() as stages:
        tables = [
            stages.enter_context(
                _stage(folder, cell, split, stage, f"w{stage}", broken, WorkerMetrics(registry), **role)
            )
            for stage, registry in enumerate(registries or [CollectorRegistry() for _ in split.split(",")])
        ]
        yield tables


@contextmanager
def _stage(
    folder: BlockFolder,
    cell: Cell,
    split: str,
    stage: int,
    worker_id: str,
    broken: Break,
    metrics: WorkerMetrics,
    *,
    device: Device = "cpu",
    care: Callable[[WorkerMetrics], DeviceCare] | None = None,
    **more: Any,
) -> Iterator[RunTable]:
    """A worker of that stage, in threads of the test."""
    client, keys, stop, blocks = cell.client, cell.keys, threading.Event(), parse_split(split)[stage]
    client.delete(keys.worker(worker_id))  # of a life before, which may have been about to leave
    name = cell.worker(worker_id, split=split, stage=stage, device=device)
    executor = broken(StageExecutor(folder, blocks.first, blocks.last, pages=100, threads=1, kernels=load_kernels(1)))
    mailbox, table = Mailbox[Event](), RunTable(executor.pool)
    links = links_of(cell, metrics=metrics, stop=stop)
    runs_on = "gpu" if device == "gpu" else "cpu"
    fields: dict[str, Any] = {"first": blocks.first, "last": blocks.last, "device": runs_on, "step_target_s": 1.0}
    engine = Engine(
        stage_role(folder, name, split=split, stage=stage, **fields, **more),
        folder.model,
        None,
        executor,
        table,
        links,
        mailbox,
        metrics,
        idle_machine(),
        sampler_of(load_kernels(1)),
        care(metrics) if care else None,
    )
    streams = [f(MODEL, c) for c in ("cpu", "gpu") for f in (keys.reruns, keys.jobs)] if stage == 0 else []
    threads = [
        Reader(client, keys.inbox(name), streams, mailbox, stop, links.watch),
        threading.Thread(target=engine.run),
    ]
    for thread in threads:
        thread.start()
    try:
        yield table
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
        table.check_integrity()


def end_of(cell: Cell, request_id: str) -> EndEntry | None:
    log = cell.log(request_id)
    return log[-1] if log and isinstance(log[-1], EndEntry) else None
