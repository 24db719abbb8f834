"""A page with a name holds the bits that the name promises: those of the same tokens computed alone."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import redis
from prometheus_client import CollectorRegistry

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.keys import Keys
from blockrelay.protocol.messages import EndEntry, TokenEntry
from blockrelay.redis.cell_settings import CellSettings, publish_cell_settings
from blockrelay.redis.client import Scripts
from blockrelay.redis.errors import RedisWatch
from blockrelay_worker.engine.loop import Engine
from blockrelay_worker.execution.batch import Batch, Segment
from blockrelay_worker.execution.cpu.stage import StageExecutor
from blockrelay_worker.execution.page_layout import pages_for
from blockrelay_worker.kernels import PAGE, load_kernels
from blockrelay_worker.kv.block_hashes import extend_hashes, root_hash
from blockrelay_worker.kv.prefix_cache import PrefixCache
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.sampling.row_sampler import sampler_of
from blockrelay_worker.transport.events import Event
from blockrelay_worker.transport.inbox_reader import Reader
from blockrelay_worker.transport.mailbox import Mailbox
from blockrelay_worker.transport.redis_links import Links, StepClock
from tests.support.cell import MODEL, Cell, body
from tests.support.models.tiny_model import write_tiny_model
from tests.support.waiting import wait_until
from tests.support.worker.machines import idle_machine
from tests.support.worker.stage_role import stage_role

ROOT = root_hash(salt="", model_hash="m", numerics="n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> BlockFolder:
    return open_block_folder(write_tiny_model(tmp_path_factory.mktemp("tiny")))


def executor_of(folder: BlockFolder, first: int, last: int, pages: int) -> StageExecutor:
    return StageExecutor(folder, first, last, pages=pages, threads=1, kernels=load_kernels(1))


@contextmanager
def engines_running(
    folder: BlockFolder, links: Links, ends: Sequence[int], pages: int, registries: Sequence[CollectorRegistry]
) -> Iterator[tuple[Cell, list[StageExecutor]]]:
    """One worker per stage, in threads of this process, and a cell to talk to them."""
    cell = Cell(links.control, links.keys, links.scripts)
    # Nobody beats for these workers: they live however long it takes.
    publish_cell_settings(links.control, links.keys, CellSettings(dead_after_ms=600_000))
    starts = [1, *(end + 1 for end in ends[:-1])]
    split = ",".join(f"{first}-{last}" for first, last in zip(starts, ends, strict=True))
    executors: list[StageExecutor] = []
    with ExitStack() as stack:
        for stage, (first, last) in enumerate(zip(starts, ends, strict=True)):
            executor = executor_of(folder, first, last, pages)
            executors.append(executor)
            metrics, mailbox = WorkerMetrics(registries[stage]), Mailbox[Event]()
            cache = PrefixCache(executor.pool, model_hash="m", numerics="n", metrics=metrics)
            worker_id = cell.worker(f"w{stage}", stage=stage, split=split, pages=pages)
            bounds: dict[str, Any] = {"max_rows": 48, "max_requests": 16, "step_target_s": 1.0}
            role = stage_role(folder, worker_id, split=split, stage=stage, first=first, last=last, **bounds)
            own = replace(links, clock=StepClock())  # each is a process of its own elsewhere
            engine = Engine(
                role,
                folder.model,
                None,
                executor,
                RunTable(executor.pool, cache),
                own,
                mailbox,
                metrics,
                idle_machine(),
                sampler_of(load_kernels(1)),
            )
            streams = [f(MODEL, "cpu") for f in (links.keys.reruns, links.keys.jobs)] if stage == 0 else []
            reader = Reader(links.control, links.keys.inbox(role.worker_id), streams, mailbox, links.stop, links.watch)
            for thread in (reader, threading.Thread(target=engine.run)):
                stack.callback(thread.join, 10)
                thread.start()
        stack.callback(links.stop.set)
        yield cell, executors


def prompts(count: int) -> list[list[int]]:
    """Some begin alike, some repeat themselves; lengths around whole pages."""
    rng = np.random.default_rng(5)
    shared = rng.integers(3, 500, 70).tolist()
    made: list[list[int]] = []
    for i in range(count):
        own = rng.integers(3, 500, int(rng.integers(2, 12))).tolist()
        made.append(shared[: int(rng.choice([0, 15, 16, 32, 48, 70]))] + own * (1 + i % 6))
    return made


@pytest.mark.parametrize("ends", [[5], [1, 3, 5]], ids="ends={}".format)
def test_every_named_page_holds_what_a_solo_run_computes(
    folder: BlockFolder, client: redis.Redis, keys: Keys, scripts: Scripts, ends: list[int]
) -> None:
    # Given engines with few pages, when requests that share, repeat and crowd each other out have ended
    registries = [CollectorRegistry() for _ in ends]
    errors, stop = RedisWatch(WorkerMetrics(CollectorRegistry()).redis_errors), threading.Event()
    links = Links(client, client, keys, scripts, errors, stop)
    pages = 40 if len(ends) == 1 else 200
    with engines_running(folder, links, ends, pages, registries) as (cell, executors):
        asked = {f"req-{i}": prompt for i, prompt in enumerate(prompts(32))}
        for i, (request_id, prompt) in enumerate(asked.items()):
            params = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.0 if i % 2 else 0.5, "seed": i}
            need = pages_for(len(prompt) + 60)
            cell.accept(request_id, content=body(prompt, **params), need=need)
        wait_until(lambda: client.zcard(keys.running) == 0, "all end", timeout_s=60)
        assert all(isinstance(cell.log(request_id)[-1], EndEntry) for request_id in asked)
    tokens = {r: asked[r] + [e.token for e in cell.log(r) if isinstance(e, TokenEntry)] for r in asked}
    assert all(len(tokens[r]) == len(asked[r]) + 60 for r in asked)

    # Then each page that still has a name holds the bits of a solo run of tokens that the name stands for
    alone = [executor_of(folder, e.first_block, e.last_block, 20) for e in executors]
    compared: list[set[bytes]] = [set() for _ in executors]
    for sequence in tokens.values():
        run_alone(alone, sequence)
        names: list[bytes] = []
        extend_hashes(names, ROOT, sequence, len(sequence) // PAGE)
        for executor, solo, seen in zip(executors, alone, compared, strict=True):
            for index, name in enumerate(names):
                found = executor.pool.share([name])
                for page in found:
                    assert same_page(executor, page, solo, index), (ends, index, sequence)
                executor.pool.free(found)
                seen.update([name] if found else [])
    for executor, seen in zip(executors, compared, strict=True):
        assert executor.pool.cached_pages == len(seen) > 0, "a name that stands for no request's tokens"

    def counted(name: str) -> float:
        return sum(registry.get_sample_value(f"blockrelay_worker_{name}_total") or 0 for registry in registries)

    assert counted("prefix_cache_hits") > 0
    assert 0 < counted("spec_decode_num_accepted_tokens") < counted("spec_decode_num_draft_tokens")
    if len(ends) == 1:
        assert counted("num_preemptions") > 0


def run_alone(executors: list[StageExecutor], tokens: Sequence[int]) -> None:
    """The whole sequence through the stages, its pages being 0, 1, 2..."""
    hidden = None
    segment = Segment(rows=len(tokens), first_position=0, pages=range(pages_for(len(tokens))))
    for executor in executors:
        ids = np.array(tokens, np.int32) if executor.takes_tokens else None
        hidden = executor.run(Batch(segments=[segment], tokens=ids, hidden=hidden)).hidden


def same_page(left: StageExecutor, left_page: int, right: StageExecutor, right_page: int) -> bool:
    """Equal bytes in every layer."""
    (one,), (other,) = left.export_pages([left_page]), right.export_pages([right_page])
    halves = [[half for layer in content for half in layer] for content in (one, other)]
    return all(a.tobytes() == b.tobytes() for a, b in zip(*halves, strict=True))
