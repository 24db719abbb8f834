"""Sessions of ONNX blocks, made when they are needed and kept warm while there is room: the least recently used one
goes first.

With room for all of them each is made once. With less, a step makes the others anew: it is how a device serves a model
that it cannot hold, block after block. The next block is made while this one computes, where the provider allows it.
All stages that a device has share one budget, and what is next may be a block of another stage.
"""

import ctypes
import gc
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from blockrelay.host.memory import anonymous_bytes
from blockrelay_worker.execution.device_memory import held_at_once
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
        return self.held(block_bytes) == sum(block_bytes)

    def held(self, block_bytes: Sequence[int]) -> int:
        """Bytes of these blocks that are on the device at once."""
        return held_at_once(block_bytes, self.sessions, self.bytes)


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
    """Those of blocks 1 to N that the stages of a device have, or all. One thread uses it; another makes the block that
    comes."""

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
        self._beside = beside
        self._maker: ThreadPoolExecutor | None = None
        self._first_clean_up: int | None = None
        self._evicted = 0
        self._limits, self._users = tries, Counter[int]()
        self.counts = WarmCounts()
        """Of work that is not a stage's."""

    def part(self, first: int, last: int) -> "WarmPart":
        """The blocks of a stage, `first` to `last`, which may be of others too; to be closed."""
        self._users.update(range(first, last + 1))
        return WarmPart(self, range(first, last + 1))

    def get(self, index: int, tries: Tries | None = None, *, counts: WarmCounts | None = None) -> AsIsBlock:
        """Block `index`, from 1; it is warm until others need its room. `tries` and `counts` are those of the work that
        it is for. Raises what making it raises, the last time."""
        counts = counts or self.counts
        if index not in self._warm:
            self._warm[index] = self._made(index, tries or self._begun(counts), counts)
        self._warm.move_to_end(index)
        return self._warm[index]

    def work(
        self,
        index: int,
        run: Callable[[AsIsBlock], None],
        *,
        last: int | None = None,
        counts: WarmCounts | None = None,
    ) -> float:
        """Have `run` done on block `index`, while the next one is made: how many seconds it has run. Behind block
        `last` (None: that of the model) none is made: what its device does then is another stage's affair, and a
        session that is made too early only takes the room of one that is needed.

        What fails is tried again by a new session, and `run` begins from the start. Raises what `run` or making the
        session raises, the last time."""
        counts = counts or self.counts
        tries, taken_s = self._begun(counts), 0.0
        while True:
            started = None
            try:
                block = self.get(index, tries, counts=counts)
                if index < (last or len(self._bytes)):
                    self.prepare(index + 1, running=index, counts=counts)
                started = time.perf_counter()
                run(block)
            except Exception as error:
                if started is not None:
                    taken_s += time.perf_counter() - started
                if started is None or not tries.again(error, what=f"block_{index}"):
                    counts.jobs_failed += 1
                    raise
                self._warm.pop(index, None)
                continue
            taken_s += time.perf_counter() - started
            counts.jobs_ok += 1
            counts.run_seconds += taken_s
            return taken_s

    def prepare(self, index: int, *, running: int, counts: WarmCounts | None = None) -> None:
        """Make block `index` in the background, if it can be while block `running` runs."""
        if not self._beside or self._coming is not None or index in self._warm or index > len(self._bytes):
            return
        if self._fits(index, {running}):
            counts = counts or self.counts
            self._make_room(index, counts, keep=running)
            self._maker = self._maker or ThreadPoolExecutor(1, "next block")
            self._coming = index, self._maker.submit(self._new, index, counts)

    @property
    def bytes(self) -> int:
        """Of those that are warm."""
        return self.bytes_of(self._warm)

    def bytes_of(self, blocks: Iterable[int]) -> int:
        """Of those of these `blocks` that are warm."""
        return sum(self._bytes[index - 1] for index in blocks if index in self._warm)

    def leave(self, blocks: Iterable[int]) -> None:
        """A stage of these blocks is closed: those that no other one has go."""
        self._users.subtract(blocks)
        self._users = +self._users
        if not self._users:
            self.close()
            return
        if self._coming is not None and self._coming[0] not in self._users:
            with suppress(Exception):  # nobody asks for it any more
                self._coming[1].result()
            self._coming = None
        for index in [one for one in self._warm if one not in self._users]:
            del self._warm[index]

    def close(self) -> None:
        """Drop all of them."""
        if self._maker is not None:
            self._maker.shutdown()
        self._maker = None
        self._warm.clear()
        self._coming = None

    def _made(self, index: int, tries: Tries, counts: WarmCounts) -> AsIsBlock:
        while True:
            try:
                return self._new_or_coming(index, counts)
            except Exception as error:
                if reason_of(error) == "out_of_memory" and self._warm:
                    self._most = len(self._warm)  # one less than there were to be
                    self._make_room(index, counts, least=True)
                elif not tries.again(error, what=f"the session of block_{index}"):
                    raise
                gc.collect()

    def _new_or_coming(self, index: int, counts: WarmCounts) -> AsIsBlock:
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == index:
            return coming[1].result()
        if coming is not None:  # something else is asked for than was thought
            with suppress(Exception):  # it is asked for again when it is needed, and says then what is wrong
                self._warm[coming[0]] = coming[1].result()
        self._make_room(index, counts)
        return self._new(index, counts)

    def _new(self, index: int, counts: WarmCounts) -> AsIsBlock:
        started = time.perf_counter()
        found = self._opened(index)
        counts.made += 1
        counts.load_seconds += time.perf_counter() - started
        return found

    def _begun(self, counts: WarmCounts) -> Tries:
        def count_retry() -> None:
            counts.retries += 1

        return Tries(self._limits, count_retry)

    def _fits(self, index: int, others: set[int]) -> bool:
        together = {index, *others}
        within = self._budget is None or sum(self._bytes[one - 1] for one in together) <= self._budget
        return len(together) <= self._most and within

    def _make_room(self, index: int, counts: WarmCounts, *, keep: int | None = None, least: bool = False) -> None:
        """`least`: all go, however much room there should be."""
        while self._warm and (least or not self._fits(index, set(self._warm))):
            gone = next((one for one in self._warm if one != keep), None)
            if gone is None:
                return
            del self._warm[gone]
            counts.evicted += 1
            self._evicted += 1
            if self._evicted % CLEAN_UP_EVERY == 0:
                self.clean_up(counts)

    def clean_up(self, counts: WarmCounts) -> None:
        """Give memory back to the system, and see whether it comes back."""
        gc.collect()
        with suppress(OSError, AttributeError):  # another C library keeps what it keeps
            ctypes.CDLL(None).malloc_trim(0)
        counts.clean_ups += 1
        now = anonymous_bytes()
        if self._first_clean_up is None:
            self._first_clean_up = now
        counts.grown = now > self._first_clean_up + GROWTH


class WarmPart:
    """The blocks of one stage among those of its device. `counts` what it had made and run, and what went for it."""

    def __init__(self, together: WarmBlocks, blocks: Sequence[int]) -> None:
        """By `WarmBlocks.part`."""
        self._together, self._blocks, self.counts = together, blocks, WarmCounts()

    @property
    def bytes(self) -> int:
        """Of those of its blocks that are warm."""
        return self._together.bytes_of(self._blocks)

    def get(self, index: int) -> AsIsBlock:
        """As of WarmBlocks."""
        return self._together.get(index, counts=self.counts)

    def work(self, index: int, run: Callable[[AsIsBlock], None]) -> float:
        """As of WarmBlocks."""
        return self._together.work(index, run, last=self._blocks[-1], counts=self.counts)

    def clean_up(self) -> None:
        """As of WarmBlocks."""
        self._together.clean_up(self.counts)

    def close(self) -> None:
        """Drop those that no other stage has."""
        self._together.leave(self._blocks)
