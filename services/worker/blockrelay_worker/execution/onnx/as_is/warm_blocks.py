"""Sessions of ONNX blocks, made when they are needed and kept warm while there is room: the least recently used one
goes first.

With room for all of them each is made once. With less, a step makes the others anew: it is how a device serves a model
that it cannot hold, block after block. The next block is made while this one computes, where the provider allows it.
"""

import ctypes
import gc
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from blockrelay.host.memory import anonymous_bytes
from blockrelay_worker.execution.onnx.as_is.block import AsIsBlock
from blockrelay_worker.execution.onnx.tries import TRIES, Tries, TryLimits, reason_of

#: Sessions that go between two clean-ups.
CLEAN_UP_EVERY = 5
#: Bytes that a process may have more behind a clean-up than behind the first one: what it does not get back, and a
#: session or two. Beyond that it is to be given a new process.
GROWTH = 512 << 20


@dataclass(frozen=True, slots=True)
class WarmLimits:
    """At most `sessions` are warm, within `bytes`, but one always is; None: as many as there are."""

    sessions: int | None = None
    bytes: int | None = None

    def within(self, room: int | None) -> "WarmLimits":
        """These, but no more than so many bytes have room for; None: nobody knows."""
        return self if room is None else replace(self, bytes=room)

    def all_of(self, block_bytes: Sequence[int]) -> bool:
        """Whether all of these blocks may be warm at once. If not, each is made anew for each step."""
        return self.held(block_bytes) == list(block_bytes)

    def held(self, block_bytes: Sequence[int]) -> list[int]:
        """Of each block what it adds to what is on the device at once: 0 of those that go beyond."""
        most = sorted(block_bytes, reverse=True)[: self.sessions or len(block_bytes)]
        left = sum(most) if self.bytes is None else min(sum(most), max(self.bytes, max(block_bytes)))
        found: list[int] = []
        for size in block_bytes:
            found.append(min(size, left))
            left -= found[-1]
        return found


ALL = WarmLimits()


@dataclass(slots=True)
class WarmCounts:
    """Since the blocks were opened: sessions, and jobs, each of them one block of one step; `retries` are tries of them
    behind the first. `grown`: behind the last clean-up the process had much more memory than behind the first."""

    made: int = 0
    evicted: int = 0
    load_seconds: float = 0.0
    clean_ups: int = 0
    jobs_ok: int = 0
    jobs_failed: int = 0
    run_seconds: float = 0.0
    retries: int = 0
    grown: bool = False


class WarmBlocks:
    """Blocks 1 to N. One thread uses it; another makes the block that comes."""

    def __init__(
        self,
        opened: Callable[[int], AsIsBlock],
        block_bytes: Sequence[int],
        *,
        limits: WarmLimits = ALL,
        beside: bool = False,
        tries: TryLimits = TRIES,
    ) -> None:
        """`opened` makes a block; each has its `block_bytes`. `beside`: one may be made while another one runs. `tries`
        are those of making and running one together."""
        self._opened, self._bytes = opened, block_bytes
        self._most, self._budget = limits.sessions or len(block_bytes), limits.bytes
        self._warm: OrderedDict[int, AsIsBlock] = OrderedDict()
        self._coming: tuple[int, Future[AsIsBlock]] | None = None
        self._maker = ThreadPoolExecutor(1, "next block") if beside else None
        self._first_clean_up: int | None = None
        self._limits = tries
        self.counts = WarmCounts()

    def get(self, index: int, tries: Tries | None = None) -> AsIsBlock:
        """Block `index`, from 1; it is warm until others need its room. `tries`: those of the work that it is for.
        Raises what making it raises, the last time."""
        if index not in self._warm:
            self._warm[index] = self._made(index, tries or self._begun())
        self._warm.move_to_end(index)
        return self._warm[index]

    def work(self, index: int, run: Callable[[AsIsBlock], None]) -> float:
        """Have `run` done on block `index`, while the next one is made: how many seconds it has run. What fails is
        tried again by a new session, and `run` begins from the start. Raises what `run` or making the session raises,
        the last time."""
        tries, taken_s = self._begun(), 0.0
        while True:
            started = None
            try:
                block = self.get(index, tries)
                self.prepare(index + 1, running=index)
                started = time.perf_counter()
                run(block)
            except Exception as error:
                if started is not None:
                    taken_s += time.perf_counter() - started
                if started is None or not tries.again(error, what=f"block_{index}"):
                    self.counts.jobs_failed += 1
                    raise
                self._warm.pop(index, None)
                continue
            taken_s += time.perf_counter() - started
            self.counts.jobs_ok += 1
            self.counts.run_seconds += taken_s
            return taken_s

    def prepare(self, index: int, *, running: int) -> None:
        """Make block `index` in the background, if it can be while block `running` runs."""
        if self._maker is None or self._coming is not None or index in self._warm or index > len(self._bytes):
            return
        if self._fits(index, {running}):
            self._make_room(index, keep=running)
            self._coming = index, self._maker.submit(self._new, index)

    @property
    def bytes(self) -> int:
        """Of those that are warm."""
        return sum(self._bytes[index - 1] for index in self._warm)

    def close(self) -> None:
        """Drop all of them."""
        if self._maker is not None:
            self._maker.shutdown()
        self._warm.clear()
        self._coming = None

    def _made(self, index: int, tries: Tries) -> AsIsBlock:
        while True:
            try:
                return self._new_or_coming(index)
            except Exception as error:
                if reason_of(error) == "out_of_memory" and self._warm:
                    self._most = len(self._warm)  # one less than there were to be
                    self._make_room(index, least=True)
                elif not tries.again(error, what=f"the session of block_{index}"):
                    raise
                gc.collect()

    def _new_or_coming(self, index: int) -> AsIsBlock:
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == index:
            return coming[1].result()
        if coming is not None:  # something else is asked for than was thought
            with suppress(Exception):  # it is asked for again when it is needed, and says then what is wrong
                self._warm[coming[0]] = coming[1].result()
        self._make_room(index)
        return self._new(index)

    def _new(self, index: int) -> AsIsBlock:
        started = time.perf_counter()
        found = self._opened(index)
        self.counts.made += 1
        self.counts.load_seconds += time.perf_counter() - started
        return found

    def _begun(self) -> Tries:
        return Tries(self._limits, self._count_retry)

    def _count_retry(self) -> None:
        self.counts.retries += 1

    def _fits(self, index: int, others: set[int]) -> bool:
        together = {index, *others}
        within = self._budget is None or sum(self._bytes[one - 1] for one in together) <= self._budget
        return len(together) <= self._most and within

    def _make_room(self, index: int, *, keep: int | None = None, least: bool = False) -> None:
        """`least`: all go, however much room there should be."""
        while self._warm and (least or not self._fits(index, set(self._warm))):
            gone = next((one for one in self._warm if one != keep), None)
            if gone is None:
                return
            del self._warm[gone]
            self.counts.evicted += 1
            if self.counts.evicted % CLEAN_UP_EVERY == 0:
                self.clean_up()

    def clean_up(self) -> None:
        """Give memory back to the system, and see whether it comes back."""
        gc.collect()
        with suppress(OSError, AttributeError):  # another C library keeps what it keeps
            ctypes.CDLL(None).malloc_trim(0)
        self.counts.clean_ups += 1
        now = anonymous_bytes()
        if self._first_clean_up is None:
            self._first_clean_up = now
        self.counts.grown = now > self._first_clean_up + GROWTH
