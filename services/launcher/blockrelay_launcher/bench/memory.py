"""Measures the memory of workers while they serve, against the weights and KV pages that they must hold."""

import re
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from blockrelay.block_folder.folder import BlockFolder
from blockrelay.block_folder.manifest import Manifest
from blockrelay.block_folder.precisions import kv_item_bytes
from blockrelay.protocol.constants import PAGE_TOKENS
from blockrelay.redis.cell_address import CellAddress
from blockrelay.settings import Settings
from blockrelay.up_file import read_running
from blockrelay_launcher.cli.status import read_status

#: Seconds between two measurements.
SAMPLE_EVERY_S = 0.25
_PAGES_USED = re.compile(r"^blockrelay_worker_kv_pages_used\{.*\} (\S+)$", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """The memory of one worker at one time, in bytes.

    `rss_anon`, `rss_shmem`, `rss_file` and `peak_rss` are RssAnon, RssShmem, RssFile and VmHWM of /proc/PID/status.
    """

    worker: str
    """Id of the worker."""
    stage: int
    rss_anon: int
    rss_shmem: int
    rss_file: int
    peak_rss: int
    weights: int
    """Bytes of the weights of its blocks."""
    kv: int
    """Bytes of the KV pages in use."""

    def entry(self) -> dict[str, Any]:
        """Returns the entry of the report, with the `ratio` of the worker's own memory to its weights and KV pages.

        Its own memory is RssAnon + RssShmem, without mapped files (page cache).
        """
        return {**asdict(self), "ratio": round((self.rss_anon + self.rss_shmem) / (self.weights + self.kv), 3)}


def weight_bytes(manifest: Manifest, first: int, last: int) -> int:
    """Returns the bytes of the tensors of blocks `first` to `last`, counted from 1, both included."""
    return sum(spec.nbytes for b in range(first, last + 1) for spec in manifest.block(b).tensors.values())


def page_bytes(manifest: Manifest, first: int, last: int) -> int:
    """Returns the bytes of one KV page in all layers of blocks `first` to `last`, counted from 1, both included."""
    model = manifest.model
    values = 2 * model.layers_in(first, last) * model.kv_heads * model.head_dim * PAGE_TOKENS
    return values * kv_item_bytes(manifest.precisions)


def parse_status(text: str) -> dict[str, int]:
    """Returns the sizes in the text of `/proc/PID/status` in bytes, by name (such as RssAnon)."""
    sizes = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)
    return {name: int(kib) * 1024 for name, kib in sizes}


def weigh(folder: BlockFolder, data: Path) -> list[WorkerMemory]:
    """Returns the present memory of every ready worker of the `up` on the folder `data`, which runs on this host.

    `folder` is the block folder that it serves; its scheduler must have made a plan. Raises UsageError if no `up` runs
    on `data`, ServiceUnavailable if its Redis does not answer, and httpx.HTTPError or OSError if a worker is gone.
    """
    running = read_running(data)
    cell = CellAddress(running.redis_url, Settings(cell=running.cell))
    workers: list[dict[str, Any]] = read_status(cell)["models"][folder.model_key]["workers"]
    return [_weigh_one(folder.manifest, worker) for worker in workers if worker["state"] == "ready"]


def _weigh_one(manifest: Manifest, worker: dict[str, Any]) -> WorkerMemory:
    first, last = worker["first"], worker["last"]
    url = f"http://{worker['host']}:{worker['port']}/metrics"
    used = _PAGES_USED.search(httpx.get(url, timeout=5, trust_env=False).text)
    memory = parse_status(Path(f"/proc/{worker['pid']}/status").read_text())
    return WorkerMemory(
        worker=worker["id"],
        stage=worker["stage"],
        rss_anon=memory["RssAnon"],
        rss_shmem=memory["RssShmem"],
        rss_file=memory["RssFile"],
        peak_rss=memory["VmHWM"],
        weights=weight_bytes(manifest, first, last),
        kv=round(float(used.group(1)) if used else 0) * page_bytes(manifest, first, last),
    )


class Scales(threading.Thread):
    """A thread that measures the workers' memory every SAMPLE_EVERY_S, from `start` to `stop`.

    `folder` is the block folder that is served by the `up` on the folder `data`. An error of `weigh` ends the thread.
    """

    def __init__(self, folder: BlockFolder, data: Path) -> None:
        super().__init__(name="scales", daemon=True)
        self._folder, self._data, self._done = folder, data, threading.Event()
        self._seen: list[WorkerMemory] = []

    def run(self) -> None:
        """Measures until `stop`; Thread calls it."""
        while not self._done.wait(SAMPLE_EVERY_S):
            self._seen += weigh(self._folder, self._data)

    def stop(self) -> list[WorkerMemory]:
        """Ends the thread and returns the memory of each worker at the time of its most KV pages.

        Call `start` first. Without any measurement it measures now, and raises what `weigh` raises.
        """
        self._done.set()
        self.join()
        return heaviest(self._seen or weigh(self._folder, self._data))


def heaviest(seen: Sequence[WorkerMemory]) -> list[WorkerMemory]:
    """Returns for each worker the measurement with the most KV (the last of equals), in the order of stages."""
    best: dict[str, WorkerMemory] = {}
    for one in seen:
        if one.worker not in best or one.kv >= best[one.worker].kv:
            best[one.worker] = one
    return sorted(best.values(), key=lambda w: (w.stage, w.worker))
