"""Between the pool and the tiers: one thread writes new pages, one fills the pages of runs that wait for them."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from blockrelay.errors import ExecutionError
from blockrelay.failpoints import reach
from blockrelay.observability.logs import get
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay_worker.execution.executor import PageOwner
from blockrelay_worker.kv.store.given import Given, GivenPages
from blockrelay_worker.kv.store.record import PageShape, decode_record, encode_record
from blockrelay_worker.kv.store.tier import StoredPage, Tier

#: Pages that wait to be written; more are dropped.
MAX_QUEUED = 4096
#: Bytes of one call of a tier, about.
CALL_BYTES = 4 << 20
#: A load stops at its next call after this; what it has by then is used.
MAX_LOAD_S = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Pages of the pool that belong to nobody else, to be filled with what their names say, from the first on. Of the
    last one only the first `begun` positions are wanted, unless that is 0: then it is full as the others. Some of them
    the client may have `given`."""

    names: tuple[bytes, ...]
    pages: tuple[int, ...]
    begun: int = 0
    given: Given | None = None


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


@dataclass(frozen=True, slots=True)
class Spoiled:
    """Pages that were written, and that nobody may find."""

    names: tuple[bytes, ...]


class PageStore:
    """The tiers of one stage's pages, asked in their order, and behind them what clients have given. `put`, `load`,
    `may_have` return at once.

    Blocks are `first_block` and as many as the pages have layers. Without tiers nothing is written.
    """

    def __init__(
        self,
        owner: PageOwner,
        tiers: Sequence[Tier],
        *,
        first_block: int,
        metrics: WorkerMetrics,
        given: GivenPages | None = None,
    ) -> None:
        layout = owner.layout
        self.shape = PageShape(layout.kv_heads, layout.head_dim, layout.dtype)
        self._owner, self._pool, self._tiers, self._metrics = owner, owner.pool, tiers, metrics
        self._given = given
        self._blocks = range(first_block, first_block + layout.layers)
        self._page_bytes = layout.layers * self.shape.record_bytes
        self._per_call = max(1, CALL_BYTES // self._page_bytes)
        #: Pages to write or to remove; an event, to be set when all before it are written; None wakes the writer to
        #: see `_closed`.
        self._fresh: queue.SimpleQueue[Fresh | Spoiled | threading.Event | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._loads: deque[tuple[Load, Callable[[Loaded], None]]] = deque()
        self._reading = False
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
        if not self._tiers:
            return
        if self._fresh.qsize() >= MAX_QUEUED:
            self._metrics.page_store_dropped.inc()
            return
        self._fresh.put(Fresh(name, page, self._pool.generations[page]))

    def discard(self, names: Sequence[bytes]) -> None:
        """Remove pages from the tiers, some time, also those that wait to be written: they are not what they should
        be."""
        self._fresh.put(Spoiled(tuple(names)))

    def load(self, load: Load, deliver: Callable[[Loaded], None]) -> None:
        """Fill pages; `deliver` is called once, from another thread. Until then the pages belong to the load."""
        with self._changed:
            self._loads.append((load, deliver))
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until no load is under way; those that are end early."""
        with self._changed:
            self._hurry = True
            self._changed.wait_for(lambda: not self._loads and not self._reading)
            self._hurry = False

    def flush(self, timeout_s: float) -> bool:
        """Wait until every page that was put is written. False when `timeout_s` passed first."""
        written = threading.Event()
        self._fresh.put(written)
        return written.wait(timeout_s)

    def close(self) -> None:
        """End both threads; what waits is dropped."""
        with self._changed:
            self._closed = self._hurry = True
            self._changed.notify_all()
        self._fresh.put(None)
        for thread in self._threads:
            thread.join()

    # --- writing ---

    def _write_all(self) -> None:
        # Fresh memory for every page would be faulted in anew: that takes longer than the copy.
        memory = memoryview(bytearray(self._per_call * self._page_bytes))
        while True:
            batch, behind = self._next_batch()
            if self._closed:
                return
            places = [memory[i * self._page_bytes :][: self._page_bytes] for i in range(len(batch))]
            pages = self.copied(batch, places)
            reach("worker.before_page_put")
            for tier in self._tiers:
                tier.put(pages, self._blocks)
                self._metrics.page_store_bytes.labels(tier.label).set(tier.used_bytes())
            reach("worker.after_page_put")
            if isinstance(behind, threading.Event):
                behind.set()
            for name in behind.names if isinstance(behind, Spoiled) else ():
                for tier in self._tiers:
                    tier.discard(name, self._blocks)

    def _next_batch(self) -> tuple[list[Fresh], Spoiled | threading.Event | None]:
        """What waits, as much as one call of a tier takes, and what comes behind: pages to remove, or whom to tell when
        it is written. Waits for the first."""
        batch: list[Fresh] = []
        item = self._fresh.get()
        with suppress(queue.Empty):
            while isinstance(item, Fresh):
                batch.append(item)
                item = self._fresh.get_nowait() if len(batch) < self._per_call else None
        return batch, item if isinstance(item, (Spoiled, threading.Event)) else None

    def copied(self, batch: Sequence[Fresh], places: Sequence[memoryview]) -> list[StoredPage]:
        """The pages' records, each page's copied to its place; without pages that changed hands before all was copied,
        and without any when the device that has them has failed."""
        if not batch:
            return []
        try:
            contents = self._owner.export_pages([fresh.page for fresh in batch])
        except ExecutionError as error:
            get().warning("PAGES_NOT_EXPORTED", pages=len(batch), error=str(error))
            self._metrics.page_store_dropped.inc(len(batch))
            return []
        size = self.shape.record_bytes
        found: list[StoredPage] = []
        for fresh, into, content in zip(batch, places, contents, strict=True):
            records = [
                encode_record(fresh.name, block, self.shape, keys, values, into[layer * size :][:size])
                for layer, (block, (keys, values)) in enumerate(zip(self._blocks, content, strict=True))
            ]
            if self._pool.generations[fresh.page] == fresh.generation:
                found.append(StoredPage(fresh.name, records))
            else:
                self._metrics.page_store_dropped.inc()
        return found

    # --- reading ---

    def _read_all(self) -> None:
        while True:
            with self._changed:
                self._reading = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._loads or self._closed)
                if not self._loads:
                    return
                load, deliver = self._loads.popleft()
                self._reading = True
            reach("worker.before_page_get")
            try:
                filled = self._fill(load)
            except ExecutionError as error:
                get().warning("PAGES_NOT_IMPORTED", pages=len(load.pages), error=str(error))
                filled = 0
            reach("worker.after_page_get")
            deliver(Loaded(load, filled))

    def _fill(self, load: Load) -> int:
        """How many pages, from the first on, were found and copied into the pool."""
        started, done = time.monotonic(), 0
        while done < len(load.names) and not self._hurry and time.monotonic() - started < MAX_LOAD_S:
            names = load.names[done : done + self._per_call]
            filled = self._fill_some(names, load.pages[done : done + self._per_call])
            if filled < len(names) and load.given is not None:
                filled = self._fill_given(load, done, filled, len(names))
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

    def _fill_given(self, load: Load, start: int, filled: int, most: int) -> int:
        """Fill pages behind the first `filled` from `start` on, as far as the client gave them; how many are filled."""
        given = load.given
        assert given is not None
        places = [(i, page) for i in range(filled, most) if (page := given.page(start + i)) is not None]
        if self._given is None or not places:
            return filled
        found = self._given.get(given.request, [page for _, page in places], self._blocks)
        for (index, _), halves in zip(places, found, strict=True):
            if halves is None or any(len(both) != 2 * self.shape.half_bytes for both in halves):
                break
            content = [self.shape.split(both) for both in halves]
            self._owner.import_pages([load.pages[start + index]], [content])
            filled = index + 1
        return filled

    def _copy_in(self, name: bytes, page: int, records: Sequence[bytes]) -> bool:
        """Verify and copy; False, copying nothing, when a record is not what it should be."""
        content: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for block, record in zip(self._blocks, records, strict=True):
            halves = decode_record(record, name, block, self.shape)
            if halves is None:
                return False
            content.append(self.shape.arrays(*halves))
        self._owner.import_pages([page], [content])
        return True
