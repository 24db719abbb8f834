"""What the workers of one device, each with a thread of its own, must know of each other: which stages share its
memory, when all of them have loaded theirs, and when all have left it.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from blockrelay.protocol.plan import Stage
from blockrelay_worker.execution.device_memory import Neighbours

#: How often a thread that waits for others looks whether it should end. Seconds.
LOOK_S = 0.1
#: How long a worker that has its stage waits for the others to get theirs: a plan names all that are registered within
#: a second. Seconds.
STAGES_S = 10.0

Asked = Callable[[], bool]


class Sharing:
    """Of `workers` workers, which call themselves by numbers. Any thread may use it; those that wait look now and then
    whether they were `asked` to end."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._changed = threading.Condition()
        self._assigned: dict[int, Stage] = {}
        self._loaded: dict[int, tuple[Stage, int]] = {}  # with the bytes of its KV pages
        self._loading = 0
        self._present: set[int] = set()
        self._leave_at: float | None = None
        #: Held by the worker that waits for a lost device, and tells of it; the others wait for that one.
        self.one_waits = threading.Lock()

    # --- memory ---

    def neighbours(self, worker: int, stage: Stage, asked: Asked) -> Neighbours:
        """Of `worker`, which will load `stage` and has none now. Waits a while until the others know theirs."""
        until = time.monotonic() + STAGES_S
        with self._changed:
            self._assigned[worker] = stage
            self._changed.notify_all()
            while len(self._known()) < self._workers and time.monotonic() < until and not asked():
                self._changed.wait(LOOK_S)
            return Neighbours(
                loaded=tuple(self._loaded.values()),
                expected=tuple(
                    other for one, other in self._assigned.items() if one != worker and one not in self._loaded
                ),
                unknown=self._workers - len(self._known()),
            )

    def has_loaded(self, worker: int, stage: Stage, pool_bytes: int) -> None:
        """Its stage is on the device, where its KV pages take so many bytes."""
        with self._changed:
            self._loaded[worker] = stage, pool_bytes

    def has_closed(self, worker: int) -> None:
        """Its stage is on the device no more."""
        with self._changed:
            self._loaded.pop(worker, None)

    def waits_for_stage(self, worker: int) -> None:
        """Which stage it will have is not known. One that it has loaded stays meanwhile."""
        with self._changed:
            self._assigned.pop(worker, None)

    def _known(self) -> set[int]:
        return {*self._assigned, *self._loaded}

    # --- loading ---

    @contextmanager
    def loading(self) -> Generator[None]:
        """A stage is loaded inside. Returns when no other is being loaded: until then no step gets its turn, so that a
        stage that is ready would only keep its requests waiting."""
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
        """When those leave who are still there, by time.monotonic; None while nobody has to."""
        return self._leave_at

    def ask_all_to_leave(self, at: float) -> None:
        """From now on they take nothing new."""
        with self._changed:
            self._leave_at = at

    def comes(self, worker: int, asked: Asked) -> None:
        """It will have its stage there, until it `leaves`. Waits while the others leave."""
        with self._changed:
            while self._leave_at is not None and not asked():
                self._changed.wait(LOOK_S)
            self._present.add(worker)

    def leaves(self, worker: int, end: Callable[[], None], asked: Asked) -> bool:
        """It does nothing there any more. True where all were asked to leave: behind the last one, which calls
        `end`."""
        with self._changed:
            self._present.discard(worker)
            if self._leave_at is None:
                return False
            if not self._present:
                end()
                self._loaded.clear()
                self._leave_at = None
                self._changed.notify_all()
            while self._leave_at is not None and not asked():
                self._changed.wait(LOOK_S)
            return True
