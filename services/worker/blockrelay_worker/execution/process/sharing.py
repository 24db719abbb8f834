"""Shared state of the workers of one device, each with a thread of its own: which stages use its memory, of which block
folder, when all of them have loaded theirs, and when all have left it."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from blockrelay.protocol.plan import Stage
from blockrelay_worker.execution.device_memory import Neighbours
from blockrelay_worker.policy import STAGES_S

#: Seconds between two looks of a waiting thread at whether it should end.
LOOK_S = 0.1

#: Returns whether the calling worker was asked to end.
ShouldEnd = Callable[[], bool]


class Sharing:
    """State shared by the workers of one device, each known by a number. Any thread may use it. A method that takes
    `should_end` calls it every LOOK_S seconds while it waits, and stops waiting when that is true."""

    def __init__(self, workers: int) -> None:
        """`workers`: how many workers have a stage on the device."""
        self._workers = workers
        self._changed = threading.Condition()
        self._assigned: dict[int, Stage] = {}
        self._loaded: dict[int, tuple[Stage, int]] = {}  # the stage, and the bytes of its KV pages
        self._folders: dict[int, str] = {}  # keys of the folders whose stages are loaded, or about to be
        self._loading = 0
        self._present: set[int] = set()
        self._leave_at: float | None = None
        #: Held by the worker that waits for a lost device and reports it; the others wait for the lock.
        self.one_waits = threading.Lock()

    # --- memory ---

    def takes(self, worker: int, folder: str) -> bool:
        """Notes that `worker`, which has no stage loaded, will load one of this folder. Returns False, and notes
        nothing, while another worker has a stage of another folder: the device has memory for one folder at a time."""
        with self._changed:
            if any(other != folder for one, other in self._folders.items() if one != worker):
                return False
            self._folders[worker] = folder
            return True

    @property
    def loaded(self) -> tuple[tuple[Stage, int], ...]:
        """The stages on the device, each with the bytes of its KV pages."""
        with self._changed:
            return tuple(self._loaded.values())

    def neighbours(self, worker: int, stage: Stage, should_end: ShouldEnd) -> Neighbours:
        """Returns the other stages on the device, for `worker`, which will load `stage` and has none now. Waits up to
        STAGES_S seconds until the stages of all workers are known."""
        until = time.monotonic() + STAGES_S
        with self._changed:
            self._assigned[worker] = stage
            self._changed.notify_all()
            while len(self._known()) < self._workers and time.monotonic() < until and not should_end():
                self._changed.wait(LOOK_S)
            return Neighbours(
                loaded=tuple(self._loaded.values()),
                expected=tuple(
                    other for one, other in self._assigned.items() if one != worker and one not in self._loaded
                ),
                unknown=self._workers - len(self._known()),
            )

    def has_loaded(self, worker: int, stage: Stage, pool_bytes: int) -> None:
        """Notes that the stage of `worker` is on the device, where its KV pages take `pool_bytes`."""
        with self._changed:
            self._loaded[worker] = stage, pool_bytes

    def has_closed(self, worker: int) -> None:
        """Notes that the stage of `worker` is no longer on the device."""
        with self._changed:
            self._loaded.pop(worker, None)
            self._folders.pop(worker, None)

    def waits_for_stage(self, worker: int) -> None:
        """Notes that the next stage of `worker` is unknown. A stage that it has loaded stays noted."""
        with self._changed:
            self._assigned.pop(worker, None)
            if worker not in self._loaded:
                self._folders.pop(worker, None)

    def _known(self) -> set[int]:
        return {*self._assigned, *self._loaded}

    # --- loading ---

    @contextmanager
    def loading(self) -> Generator[None]:
        """Context in which a stage is loaded. Its end waits until no other stage is being loaded: no step gets its turn
        before that, so a stage that is ready would only keep its requests waiting. An exception ends it at once."""
        with self._changed:
            self._loading += 1
        try:
            yield
        finally:
            with self._changed:
                self._loading -= 1
                self._changed.notify_all()
        with self._changed:
            self._changed.wait_for(lambda: self._loading == 0)

    # --- renewal: all leave, and the last one ends the process ---

    @property
    def leave_at(self) -> float | None:
        """When workers that are still there leave, in seconds of time.monotonic; None while they may stay."""
        return self._leave_at

    def ask_all_to_leave(self, at: float) -> None:
        """Asks all workers to take nothing new from now on, and to leave by `at` (time.monotonic)."""
        with self._changed:
            self._leave_at = at

    def join(self, worker: int, should_end: ShouldEnd) -> None:
        """Notes that `worker` will have a stage on the device until it calls `leave`. Waits while the others leave."""
        with self._changed:
            while self._leave_at is not None and not should_end():
                self._changed.wait(LOOK_S)
            self._present.add(worker)

    def leave(self, worker: int, end: Callable[[], None], should_end: ShouldEnd) -> bool:
        """Notes that `worker` does nothing on the device any more. Returns False unless all were asked to leave.

        Otherwise it returns True when the last worker has left, or when `should_end` is true. The last one calls `end`,
        which ends the device's process; other threads that use this object wait meanwhile."""
        with self._changed:
            self._present.discard(worker)
            if self._leave_at is None:
                return False
            if not self._present:
                end()
                self._loaded.clear()
                self._folders.clear()
                self._leave_at = None
                self._changed.notify_all()
            while self._leave_at is not None and not should_end():
                self._changed.wait(LOOK_S)
            return True
