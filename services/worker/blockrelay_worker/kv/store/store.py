"""Moves KV pages between pool and tiers: one thread writes new pages, one fills pages that runs wait for."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from numpy.typing import NDArray

from blockrelay.errors import ExecutionError
from blockrelay.failpoints import reach
from blockrelay.observability.logs import get
from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay_worker.execution.executor import PageOwner
from blockrelay_worker.kv.store.record import PageShape, decode_record, encode_record
from blockrelay_worker.kv.store.supplied_kv import SuppliedPages
from blockrelay_worker.kv.store.tier import StoredPage, Tier
from blockrelay_worker.policy import PAGES_QUEUED, STORE_CALL_BYTES, STORE_LOAD_S
from blockrelay_worker.runs.kv_load import KvLoad, Loaded


@dataclass(frozen=True, slots=True)
class Fresh:
    """A published page to be written; dropped if its `generation` in the pool has changed by then."""

    block_hash: bytes
    page: int
    generation: int


class PageStore:
    """The page store of one stage: its tiers in the order of lookup, then KV that clients supplied.

    All methods but `settle`, `flush` and `close` return at once. The stage's blocks begin with `first_block`, and are
    as many as pages have layers: at least one. Every page that is put is written to all of `tiers`; `swap`, the last in
    the order, is for runs that were preempted or run again, and gets only pages that no other tier holds. Starts two
    threads; `close` ends them, and no method may be called after it.
    """

    def __init__(
        self,
        owner: PageOwner,
        tiers: Sequence[Tier],
        *,
        first_block: int,
        metrics: WorkerMetrics,
        given: SuppliedPages | None = None,
        swap: Tier | None = None,
    ) -> None:
        layout = owner.layout
        self.shape = PageShape(layout.kv_heads, layout.head_dim, layout.dtype)
        self._owner, self._pool, self._tiers, self._metrics = owner, owner.pool, tiers, metrics
        self._given, self._swap = given, swap
        self._lookup = [*tiers, *([swap] if swap else [])]
        self._blocks = range(first_block, first_block + layout.layers)
        self._page_bytes = layout.layers * self.shape.record_bytes
        self._per_call = max(1, STORE_CALL_BYTES // self._page_bytes)
        #: The writer's queue: pages to write; a function, to be called once all before it is written; None, to have the
        #: writer check `_closed`.
        self._fresh: queue.SimpleQueue[Fresh | Callable[[], object] | None] = queue.SimpleQueue()
        #: The reader's queue: loads; an event, to be set once all before it have ended; None: the end.
        self._loads: queue.SimpleQueue[tuple[KvLoad, Callable[[Loaded], None]] | threading.Event | None]
        self._loads = queue.SimpleQueue()
        self._closed = False
        self._hurry = False  # `settle` or `close` waits for the reader: load nothing more
        self._threads = [
            threading.Thread(target=self._write_all, name="page writer", daemon=True),
            threading.Thread(target=self._read_all, name="page reader", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def may_have(self, block_hash: bytes, *, resumes: bool = False) -> bool:
        """False if no tier could give the page of this name now: they lack it, or pause after a failure.

        The swap tier is not asked, because a disk may be slow: it may have pages of any run that `resumes`.
        """
        return any(tier.may_have(block_hash) for tier in self._tiers) or (resumes and self._swap is not None)

    def put(self, page: int, block_hash: bytes) -> None:
        """Queues a published page to be written. Dropped if too many wait, or if the page is reused before that."""
        if not self._tiers:
            return
        if self._fresh.qsize() >= PAGES_QUEUED:
            self._metrics.page_store_dropped.inc()
            return
        self._fresh.put(self._as_it_is(page, block_hash))

    def discard(self, hashes: Sequence[bytes]) -> None:
        """Queues the removal of these pages from the tiers, after all writes before it: their content is wrong."""
        self._fresh.put(partial(self._remove, tuple(hashes)))

    def hold(self, pages: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Queues the holding of a preempted run's published pages, in order, until `let_go` or HOLD_S seconds later.

        Those that no tier holds are written to the swap tier, unless they are reused before that.
        """
        if self._lookup:
            self._fresh.put(partial(self._hold, [*map(self._as_it_is, pages, hashes)]))

    def let_go(self, hashes: Sequence[bytes]) -> None:
        """Queues the end of the holding of these pages."""
        if self._lookup:
            self._fresh.put(partial(self._let_go, tuple(hashes)))

    def load(self, load: KvLoad, deliver: Callable[[Loaded], None]) -> None:
        """Starts to fill the pages of a load. `deliver` is called once, from another thread, when it has ended."""
        self._loads.put((load, deliver))

    def settle(self) -> None:
        """Waits until no load is under way; those under way end early."""
        self._hurry, ended = True, threading.Event()
        self._loads.put(ended)
        ended.wait()
        self._hurry = False

    def flush(self, timeout_s: float) -> bool:
        """Waits until every page that was put is written. False if `timeout_s` passed first."""
        written = threading.Event()
        self._fresh.put(written.set)
        return written.wait(timeout_s)

    def close(self) -> None:
        """Ends both threads; pages that wait to be written are dropped."""
        self._closed = self._hurry = True
        self._fresh.put(None)
        self._loads.put(None)
        for thread in self._threads:
            thread.join()

    # --- writing ---

    def _write_all(self) -> None:
        """The writer thread: writes published pages to all tiers, and removes wrong ones, until `close`."""
        while True:
            batch, behind = self._next_batch()
            if self._closed:
                return
            self._write(batch, self._tiers)
            if behind is not None:
                behind()

    def _write(self, batch: Sequence[Fresh], tiers: Sequence[Tier]) -> list[StoredPage]:
        """Writes pages, at most as many as `_places`, to these tiers; returns those that were copied."""
        pages = self.copied(batch, self._places[: len(batch)] if batch else [])
        reach("worker.before_page_put")
        for tier in tiers:
            tier.put(pages, self._blocks)
            self._metrics.page_store_bytes.labels(tier.label).set(tier.used_bytes())
        reach("worker.after_page_put")
        return pages

    def _remove(self, hashes: Sequence[bytes]) -> None:
        for tier in self._lookup:
            for block_hash in hashes:
                tier.discard(block_hash, self._blocks)

    def _hold(self, pages: Sequence[Fresh]) -> None:
        """Holds pages in the first tier that has them; writes the others to the swap tier."""
        began, left = time.monotonic(), list(pages)
        for tier in self._lookup:
            held = tier.hold([page.block_hash for page in left], self._blocks)
            left = [page for page, is_held in zip(left, held, strict=True) if not is_held]
        swapped = len(pages) - len(left)
        while left and self._swap is not None and not self._closed:
            written = self._write(left[: self._per_call], [self._swap])
            swapped += sum(self._swap.hold([page.block_hash for page in written], self._blocks))
            del left[: self._per_call]
        self._metrics.swapped("out", swapped, swapped * self._page_bytes, time.monotonic() - began)

    def _let_go(self, hashes: Sequence[bytes]) -> None:
        for tier in self._lookup:
            tier.let_go(hashes, self._blocks)

    @cached_property
    def _places(self) -> list[memoryview]:
        """Places for the records of one call's pages: page faults of new memory would take longer than the copy."""
        memory, size = memoryview(bytearray(self._per_call * self._page_bytes)), self._page_bytes
        return [memory[i * size :][:size] for i in range(self._per_call)]

    def _as_it_is(self, page: int, block_hash: bytes) -> Fresh:
        return Fresh(block_hash, page, self._pool.generations[page])

    def _next_batch(self) -> tuple[list[Fresh], Callable[[], object] | None]:
        """Returns the next pages to write, for one call of a tier, and what is to be called behind them, if anything.

        Waits for the first item.
        """
        batch: list[Fresh] = []
        item = self._fresh.get()
        with suppress(queue.Empty):
            while isinstance(item, Fresh):
                batch.append(item)
                item = self._fresh.get_nowait() if len(batch) < self._per_call else None
        return batch, None if isinstance(item, Fresh) else item

    def copied(self, batch: Sequence[Fresh], places: Sequence[memoryview]) -> list[StoredPage]:
        """Returns the records of the pages in `batch`, each page's copied to its place in `places`.

        A place has the bytes of one record for each of the stage's blocks.
        Leaves out pages that were reused before their copy was complete, and all if the device with them failed; both
        are counted as dropped.
        """
        if not batch:
            return []
        try:
            contents = self._owner.export_pages([fresh.page for fresh in batch])
        except ExecutionError as error:
            get().warning("PAGES_NOT_EXPORTED", pages=len(batch), error=str(error))
            self._metrics.page_store_dropped.inc(len(batch))
            return []
        size = self.shape.record_bytes
        pages: list[StoredPage] = []
        for fresh, into, content in zip(batch, places, contents, strict=True):
            records = [
                encode_record(fresh.block_hash, block, self.shape, keys, values, into[layer * size :][:size])
                for layer, (block, (keys, values)) in enumerate(zip(self._blocks, content, strict=True))
            ]
            if self._pool.generations[fresh.page] == fresh.generation:
                pages.append(StoredPage(fresh.block_hash, records))
            else:
                self._metrics.page_store_dropped.inc()
        return pages

    # --- reading ---

    def _read_all(self) -> None:
        """The reader thread: fills the pages of loads, one load after the other, until `close`."""
        while (item := self._loads.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            load, deliver = item
            began = time.monotonic()
            reach("worker.before_page_get")
            try:
                filled = self._fill(load)
            except ExecutionError as error:
                get().warning("PAGES_NOT_IMPORTED", pages=len(load.pages), error=str(error))
                filled = 0
            reach("worker.after_page_get")
            if load.resumes:
                self._metrics.swapped("in", filled, filled * self._page_bytes, time.monotonic() - began)
            deliver(Loaded(load, filled))

    def _fill(self, load: KvLoad) -> int:
        """Fills the load's pages in order, up to the first that is missing; returns their number."""
        started, done = time.monotonic(), 0
        while done < len(load.hashes) and not self._hurry and time.monotonic() - started < STORE_LOAD_S:
            hashes = load.hashes[done : done + self._per_call]
            tiers = self._lookup if load.resumes else self._tiers
            filled = self._fill_some(tiers, hashes, load.pages[done : done + self._per_call])
            if filled < len(hashes) and load.given is not None:
                filled = self._fill_given(load, done, filled, len(hashes))
            done += filled
            if filled < len(hashes):
                break
        return done

    def _fill_some(self, tiers: Sequence[Tier], hashes: Sequence[bytes], pages: Sequence[int]) -> int:
        """Fills pages from these tiers; returns the number of leading pages that are filled."""
        filled: set[int] = set()
        for tier in tiers:
            missing = [i for i in range(len(hashes)) if i not in filled]
            for i, records in zip(missing, tier.get([hashes[i] for i in missing], self._blocks), strict=True):
                if records is None:
                    self._metrics.page_store_misses.labels(tier.label).inc()
                elif self._copy_in(hashes[i], pages[i], records):
                    self._metrics.page_store_hits.labels(tier.label).inc()
                    filled.add(i)
                else:
                    self._metrics.page_store_trouble.labels(tier.label, "corrupt").inc()
                    tier.discard(hashes[i], self._blocks)
            if len(filled) == len(hashes):
                break
        return next((i for i in range(len(hashes)) if i not in filled), len(hashes))

    def _fill_given(self, load: KvLoad, start: int, filled: int, end: int) -> int:
        """Fills pages `filled` to `end` - 1, counted from `start`, with KV that the client supplied.

        Stops at the first page that was not supplied or has another size; returns the new `filled`.
        """
        given = load.given
        assert given is not None
        places = [(i, page) for i in range(filled, end) if (page := given.page(start + i)) is not None]
        if self._given is None or not places:
            return filled
        contents = self._given.get(given.request_id, [page for _, page in places], self._blocks)
        for (index, _), halves in zip(places, contents, strict=True):
            if halves is None or any(len(both) != 2 * self.shape.half_bytes for both in halves):
                break
            content = [self.shape.split(both) for both in halves]
            self._owner.import_pages([load.pages[start + index]], [content])
            filled = index + 1
        return filled

    def _copy_in(self, block_hash: bytes, page: int, records: Sequence[bytes]) -> bool:
        """Verifies the records of a page and copies them into the pool. False, copying nothing, if one is corrupt."""
        content: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for block, record in zip(self._blocks, records, strict=True):
            halves = decode_record(record, block_hash, block, self.shape)
            if halves is None:
                return False
            content.append(self.shape.arrays(*halves))
        self._owner.import_pages([page], [content])
        return True
