"""Sessions of ONNX blocks, made when they are needed and kept warm while there is room. The least recently used
one is dropped first.

With room for all, each is made once. With less, each step makes the others again: so a device serves a model that it
cannot hold, block after block. The next block is made while this one computes, if the provider allows it. All stages of
a device share one budget, and the next block may belong to another stage.
"""

import ctypes
import gc
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from blockrelay.host.memory import anonymous_bytes
from blockrelay_worker.execution.device_memory import held_at_once
from blockrelay_worker.execution.onnx.as_is.block import AsIsBlock
from blockrelay_worker.execution.onnx.tries import TRIES, Tries, TryLimits, reason_of
from blockrelay_worker.policy import MAX_GROWTH_BYTES, SESSIONS_A_CLEAN_UP


@dataclass(frozen=True, slots=True)
class WarmLimits:
    """At most `sessions` sessions are warm, of at most `bytes` bytes together, but always one; None: no limit."""

    sessions: int | None = None
    bytes: int | None = None

    def all_of(self, block_bytes: Sequence[int]) -> bool:
        """Returns whether all of these blocks may be warm at once. If not, each is made again for each step."""
        return held_at_once(block_bytes, self.sessions, self.bytes) == sum(block_bytes)


#: No limits: every block stays warm.
ALL = WarmLimits()


@dataclass(slots=True)
class WarmCounts:
    """Counts since the blocks were opened. A job is one block of one step."""

    made: int = 0
    """Sessions that were made."""
    evicted: int = 0
    """Sessions that were dropped for others."""
    load_seconds: float = 0.0
    """Seconds of making sessions."""
    clean_ups: int = 0
    """How often memory was given back to the system."""
    jobs_ok: int = 0
    jobs_failed: int = 0
    run_seconds: float = 0.0
    """Seconds of jobs that succeeded, failed tries included."""
    retries: int = 0
    """Tries of jobs, after the first of each."""
    grown: bool = False
    """True if the process had much more memory after the last clean-up than after the first."""


class WarmBlocks:
    """The sessions of blocks 1 to N of one model, for all stages of a device. One thread uses it; a second one makes
    the next block."""

    def __init__(
        self,
        opened: Callable[[int], AsIsBlock],
        block_bytes: Sequence[int],
        *,
        limits: WarmLimits = ALL,
        beside: bool = False,
        tries: TryLimits = TRIES,
    ) -> None:
        """`opened` makes a block's session, which takes the bytes in `block_bytes`. `beside`: one may be made while
        another one runs. `tries`: the limits for making and running a block, together."""
        self._opened, self._bytes = opened, block_bytes
        self._max_sessions, self._budget = limits.sessions or len(block_bytes), limits.bytes
        self._warm: OrderedDict[int, AsIsBlock] = OrderedDict()
        self._coming: tuple[int, Future[AsIsBlock]] | None = None
        self._beside = beside
        self._maker: ThreadPoolExecutor | None = None
        self._first_clean_up: int | None = None
        self._evicted = 0
        self._limits, self._users = tries, Counter[int]()

    def part(self, first: int, last: int) -> "WarmPart":
        """Returns the blocks `first` to `last` (from 1, both included) for a stage, which closes them once. Others may
        share them."""
        self._users.update(range(first, last + 1))
        return WarmPart(self, range(first, last + 1))

    def get(self, index: int, counts: WarmCounts, tries: Tries | None = None) -> AsIsBlock:
        """Returns block `index`, counted from 1; it is warm until others need its room. `tries` and `counts` belong to
        the work that needs it. Raises what the last try to make it raises."""
        if index not in self._warm:
            self._warm[index] = self._made(index, tries or self._new_tries(counts), counts)
        self._warm.move_to_end(index)
        return self._warm[index]

    def work(self, index: int, run: Callable[[AsIsBlock], None], counts: WarmCounts, *, last: int) -> float:
        """Calls `run` with block `index`, while the next block is made. Returns the seconds that `run` took, failed
        tries included. After block `last` no block is made: another stage may come next, and a session made too early
        takes the room of one that is needed.

        If `run` fails and may be tried again (`Tries.again`), a new session is made and `run` is called again. Raises
        what the last try raises, and what `get` raises.
        """
        tries, taken_s = self._new_tries(counts), 0.0
        while True:
            started = None
            try:
                block = self.get(index, counts, tries)
                if index < last:
                    self._prepare(index + 1, counts, running=index)
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

    def _prepare(self, index: int, counts: WarmCounts, *, running: int) -> None:
        """Starts to make block `index` in the background, if that is possible while block `running` runs."""
        if self._beside and self._coming is None and index not in self._warm and self._fits(index, {running}):
            self._make_room(index, counts, keep=running)
            self._maker = self._maker or ThreadPoolExecutor(1, "next block")
            self._coming = index, self._maker.submit(self._new, index, counts)

    def bytes_of(self, blocks: Iterable[int]) -> int:
        """Returns the bytes of those of `blocks` that are warm."""
        return sum(self._bytes[index - 1] for index in blocks if index in self._warm)

    def leave(self, blocks: Iterable[int]) -> None:
        """Notes that a stage of these blocks is closed. Drops the sessions that no other stage has."""
        self._users.subtract(blocks)
        self._users = +self._users
        if not self._users:
            self.close()
            return
        if self._coming is not None and self._coming[0] not in self._users:
            with suppress(Exception):  # no stage needs it any more
                self._coming[1].result()
            self._coming = None
        for index in [one for one in self._warm if one not in self._users]:
            del self._warm[index]

    def close(self) -> None:
        """Drops all sessions, after waiting for one that is being made."""
        if self._maker is not None:
            self._maker.shutdown()
        self._maker = None
        self._warm.clear()
        self._coming = None

    def _made(self, index: int, tries: Tries, counts: WarmCounts) -> AsIsBlock:
        """Returns a session of block `index`. Without memory it drops all others and tries with fewer at once from then
        on."""
        while True:
            try:
                return self._new_or_coming(index, counts)
            except Exception as error:
                if reason_of(error) == "out_of_memory" and self._warm:
                    self._max_sessions = len(self._warm)  # one less than was tried
                    self._make_room(index, counts, least=True)
                elif not tries.again(error, what=f"the session of block_{index}"):
                    raise
                gc.collect()

    def _new_or_coming(self, index: int, counts: WarmCounts) -> AsIsBlock:
        """Returns the session that is being made in the background, if it is block `index`; else a new one."""
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == index:
            return coming[1].result()
        if coming is not None:  # another block is needed than the one prepared
            with suppress(Exception):  # it is made again when needed, and raises its error then
                self._warm[coming[0]] = coming[1].result()
        self._make_room(index, counts)
        return self._new(index, counts)

    def _new(self, index: int, counts: WarmCounts) -> AsIsBlock:
        started = time.perf_counter()
        block = self._opened(index)
        counts.made += 1
        counts.load_seconds += time.perf_counter() - started
        return block

    def _new_tries(self, counts: WarmCounts) -> Tries:
        """Returns the tries of one job, which count retries in `counts`."""

        def count_retry() -> None:
            counts.retries += 1

        return Tries(self._limits, count_retry)

    def _fits(self, index: int, others: set[int]) -> bool:
        """Returns whether block `index` and the `others` may be warm together."""
        together = {index, *others}
        within = self._budget is None or sum(self._bytes[one - 1] for one in together) <= self._budget
        return len(together) <= self._max_sessions and within

    def _make_room(self, index: int, counts: WarmCounts, *, keep: int | None = None, least: bool = False) -> None:
        """Drops sessions until block `index` fits, but not `keep`. `least`: drops all, whatever the limits say."""
        while self._warm and (least or not self._fits(index, set(self._warm))):
            gone = next((one for one in self._warm if one != keep), None)
            if gone is None:
                return
            del self._warm[gone]
            counts.evicted += 1
            self._evicted += 1
            if self._evicted % SESSIONS_A_CLEAN_UP == 0:
                self.clean_up(counts)

    def clean_up(self, counts: WarmCounts) -> None:
        """Gives memory back to the system, and notes in `counts` whether the process has grown since the first
        clean-up."""
        gc.collect()
        with suppress(OSError, AttributeError):  # only glibc has malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
        counts.clean_ups += 1
        now = anonymous_bytes()
        if self._first_clean_up is None:
            self._first_clean_up = now
        counts.grown = now > self._first_clean_up + MAX_GROWTH_BYTES


class WarmPart:
    """The blocks of one stage among those of its device. `counts`: what was made, run and dropped for this stage."""

    def __init__(self, together: WarmBlocks, blocks: Sequence[int]) -> None:
        """Made by `WarmBlocks.part`."""
        self._together, self._blocks, self.counts = together, blocks, WarmCounts()

    @property
    def bytes(self) -> int:
        """Bytes of those of its blocks that are warm."""
        return self._together.bytes_of(self._blocks)

    def get(self, index: int) -> AsIsBlock:
        """Returns block `index`: see `WarmBlocks.get`."""
        return self._together.get(index, self.counts)

    def work(self, index: int, run: Callable[[AsIsBlock], None]) -> float:
        """Runs a job on block `index`: see `WarmBlocks.work`."""
        return self._together.work(index, run, self.counts, last=self._blocks[-1])

    def clean_up(self) -> None:
        """Gives memory back to the system: see `WarmBlocks.clean_up`."""
        self._together.clean_up(self.counts)

    def close(self) -> None:
        """Drops the sessions that no other stage has."""
        self._together.leave(self._blocks)
