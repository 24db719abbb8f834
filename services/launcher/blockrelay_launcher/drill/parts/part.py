"""The base class of the parts of a drill, which act on its system in threads of their own."""

import threading
from dataclasses import dataclass, field

from blockrelay_launcher.drill.faults import Fault


@dataclass(slots=True)
class DrillPart:
    """The base class of a thread that acts on the system of a drill, from `start` to `finish`.

    Subclasses act in `_run` until `_over` is set; `done` has their faults, in order.
    """

    done: list[Fault] = field(default_factory=list[Fault], init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Ends the thread and waits for it."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def troubles(self) -> list[str]:
        """A sentence for each action that was due and did not happen."""
        return []

    def _run(self) -> None:
        raise NotImplementedError
