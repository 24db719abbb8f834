"""Something that a drill does to its system, in a thread of its own."""

import threading
from dataclasses import dataclass, field

from blockrelay_launcher.drill.faults import Fault


@dataclass(slots=True)
class DrillPart:
    """`done` has what hurt somebody, in order. Subclasses say in `_run` what is done until `_over` is set."""

    done: list[Fault] = field(default_factory=list[Fault], init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """What has not been done by now is not."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def troubles(self) -> list[str]:
        """What was owed and did not happen, one sentence each."""
        return []

    def _run(self) -> None:
        raise NotImplementedError
