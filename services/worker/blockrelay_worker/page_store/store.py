"""Between the pool and the tiers: one thread writes new pages, one fills the pages of runs that wait for them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from blockrelay.failpoints import reach
from blockrelay.metrics import WorkerMetrics
from blockrelay_worker.page_store.record import PageShape, decode_record, encode_record
from blockrelay_worker.page_store.tier import StoredPage, Tier
from blockrelay_worker.pages import PagePool

#: Pages that wait to be written; more are dropped.
MAX_QUEUED = 4096
#: Bytes of one call of a tier, about.
CALL_BYTES = 4 << 20
#: A load stops at its next call after this; what it has by then is used.
MAX_LOAD_S = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Pages of the pool that belong to nobody else, to be filled with what their names say, from the first on."""

    names: tuple[bytes, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first `count` pages of `load` hold what their names say; the others hold rubbish."""

    load: Load
    count: int


@dataclass(frozen=True, slots=True)
class Fresh:
    """A page that was named. It is written only if it still is what it was then."""

    name: bytes
    page: int
    generation: int


class PageStore:
    """The tiers of one stage's pool, asked in their order. `put`, `load`, `may_have` return at once.

    Blocks are `first_block` and as many as the pool has layers.
    """

    def __init__(self, pool: PagePool, tiers: Sequence[Tier], *, first_block: int, metrics: WorkerMetrics) -> None:
        layout = pool.layout
        self.shape = PageShape(layout.kv_heads, layout.head_dim, layout.dtype)
        self._pool, self._tiers, self._metrics = pool, tiers, metrics
        self._blocks = range(first_block, first_block + layout.layers)
        self._per_call = max(1, CALL_BYTES // (layout.layers * self.shape.record_bytes))
        self._changed = threading.Condition()
        self._fresh: deque[Fresh] = deque()
        self._loads: deque[tuple[Load, Callable[[Loaded], None]]] = deque()
        self._busy = {"reader": False, "writer": False}
        self._closed = False
        self._hurry = False  # somebody waits for the reader: load nothing more
        self._threads = [
            threading.Thread(target=self._write_all, name="page writer", daemon=True),
            threading.Thread(target=self._read_all, name="page reader", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def may_have(self, name: bytes) -> bool:
        return any(tier.may_have(name) for tier in self._tiers)

    def put(self, page: int, name: bytes) -> None:
        """Write a named page, some time. Dropped when too many wait, or when the page has changed hands by then."""
        with self._changed:
            if len(self._fresh) >= MAX_QUEUED:
                self._metrics.page_store_dropped.inc()
                return
            self._fresh.append(Fresh(name, page, self._pool.generations[page]))
            self._changed.notify_all()

    def load(self, load: Load, deliver: Callable[[Loaded], None]) -> None:
        """Fill pages; `deliver` is called once, from another thread. Until then the pages belong to the load."""
        with self._changed:
            self._loads.append((load, deliver))
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until no load is under way; those that are end early."""
        with self._changed:
            self._hurry = True
            self._changed.wait_for(lambda: not self._loads and not self._busy["reader"])
            self._hurry = False

    def flush(self, timeout_s: float) -> bool:
        """Wait until every page that was put is written. False when `timeout_s` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._fresh and not self._busy["writer"], timeout_s)

    def close(self) -> None:
        """End both threads; what waits is dropped."""
        with self._changed:
            self._closed = self._hurry = True
            self._fresh.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # --- writing ---

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._busy["writer"] = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._fresh or self._closed)
                if self._closed:
                    return
                batch = [self._fresh.popleft() for _ in range(min(self._per_call, len(self._fresh)))]
                self._busy["writer"] = True
            pages = [page for fresh in batch if (page := self.copied(fresh)) is not None]
            reach("worker.before_page_put")
            for tier in self._tiers:
                tier.put(pages, self._blocks)
                self._metrics.page_store_bytes.labels(tier.label).set(tier.used_bytes())
            reach("worker.after_page_put")

    def copied(self, fresh: Fresh) -> StoredPage | None:
        """The page's records; None when it changed hands before they were all copied."""
        records = [
            encode_record(fresh.name, block, self.shape, keys[fresh.page], values[fresh.page])
            for block, keys, values in zip(self._blocks, self._pool.k_pages, self._pool.v_pages, strict=True)
        ]
        if self._pool.generations[fresh.page] != fresh.generation:
            self._metrics.page_store_dropped.inc()
            return None
        return StoredPage(fresh.name, records)

    # --- reading ---

    def _read_all(self) -> None:
        while True:
            with self._changed:
                self._busy["reader"] = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._loads or self._closed)
                if not self._loads:
                    return
                load, deliver = self._loads.popleft()
                self._busy["reader"] = True
            reach("worker.before_page_get")
            filled = self._fill(load)
            reach("worker.after_page_get")
            deliver(Loaded(load, filled))

    def _fill(self, load: Load) -> int:
        """How many pages, from the first on, were found and copied into the pool."""
        started, done = time.monotonic(), 0
        while done < len(load.names) and not self._hurry and time.monotonic() - started < MAX_LOAD_S:
            names = load.names[done : done + self._per_call]
            filled = self._fill_some(names, load.pages[done : done + self._per_call])
            done += filled
            if filled < len(names):
                break
        return done

    def _fill_some(self, names: Sequence[bytes], pages: Sequence[int]) -> int:
        filled: set[int] = set()
        for tier in self._tiers:
            asked = [i for i in range(len(names)) if i not in filled]
            for i, records in zip(asked, tier.get([names[i] for i in asked], self._blocks), strict=True):
                if records is None:
                    self._metrics.page_store_misses.labels(tier.label).inc()
                elif self._copy_in(names[i], pages[i], records):
                    self._metrics.page_store_hits.labels(tier.label).inc()
                    filled.add(i)
                else:
                    self._metrics.page_store_trouble.labels(tier.label, "corrupt").inc()
                    tier.discard(names[i], self._blocks)
            if len(filled) == len(names):
                break
        return next((i for i in range(len(names)) if i not in filled), len(names))

    def _copy_in(self, name: bytes, page: int, records: Sequence[bytes]) -> bool:
        """Verify and copy; False when a record is not what it should be."""
        pool = self._pool
        for layer, (block, record) in enumerate(zip(self._blocks, records, strict=True)):
            halves = decode_record(record, name, block, self.shape)
            if halves is None:
                return False
            for target, half in zip((pool.k_pages[layer][page], pool.v_pages[layer][page]), halves, strict=True):
                target[...] = np.frombuffer(half, target.dtype).reshape(target.shape)
        return True
