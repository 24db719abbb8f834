"""Prepares the stage that another plan gives a worker beside the one that it serves, so that no request waits for it.

The successor is a second worker in the same process: it has a registration, an engine and KV pages of its own. Once all
stages of the plan in force have workers that serve, the first one passes its requests on and goes.
"""

import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol

from blockrelay.errors import BlockrelayError
from blockrelay.observability.logs import get
from blockrelay.protocol.plan import Plan, Stage, is_served, succeeded
from blockrelay.redis.registry import read_workers
from blockrelay_worker.transport.events import Departure
from blockrelay_worker.transport.redis_links import Links, Stopping

#: Seconds between two looks whether all stages of the plan are served: each reads the records of all workers. With
#: more than 16 they are further apart, because all of these look.
LOOK_S = 0.5


class Service(Protocol):
    """A worker's service of one stage, which `run` registers, loads, announces and serves until its end."""

    split: str
    """The stages of the model of which it serves one; empty before it has announced that."""
    is_overtaken: bool
    """Whether it leaves because another plan came before it could take over from the present service."""

    def run(self) -> None:
        """Registers, loads and serves. Returns soon after a drain of the worker was requested."""
        ...


class Succession:
    """The change of one service of a stage for another one. The heartbeat's thread calls it, and `join` the worker's.

    `make` returns the service of the stage of these blocks, None where there is no room for both, or `later`: it is to
    be asked again.
    """

    def __init__(self, links: Links, model: str, make: Callable[[Stage], Service | Literal["later"] | None]) -> None:
        self._links, self._model, self._make = links, model, make
        self._told, self._next_look = False, 0.0  # monotonic
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.has_begun = False
        #: The leave of the present service, once `is_over` has returned True.
        self.departure = Departure()
        #: Why the worker must leave its stage before it can load another one; None: it need not.
        self.failure: str | None = None
        #: The successor, once there is one.
        self.service: Service | None = None

    def begin(self, blocks: Stage) -> None:
        """Starts the successor in a thread of its own, after the end of one that was overtaken.

        `failure` is set if there is no room for it. Raises what `make` raises; then it has not begun.
        """
        if self._thread is not None:
            self._thread.join()
        made = self._make(blocks)
        if made == "later":
            return
        self.service, self.has_begun = made, True
        if self.service is None:
            self.failure = "the plan gives this worker another stage, and there is no room for both"
            return
        self._thread = threading.Thread(target=self._run, args=(self.service,), name="successor", daemon=True)
        self._thread.start()

    def is_over(self, plan: Plan) -> bool:
        """Returns True once: when the successor and workers of all other stages of `plan` serve."""
        service = self.service
        if self._told or service is None or service.is_overtaken or service.split != plan.split:
            return False
        if time.monotonic() < self._next_look:
            return False
        workers = read_workers(self._links.control, self._links.keys, self._model)
        self._next_look = time.monotonic() + LOOK_S * max(1.0, len(workers) / 16)
        leaving = succeeded(workers)
        self._told = is_served(plan.split, [worker for worker in workers if worker.id not in leaving])
        return self._told

    def call_off(self) -> None:
        """Has the present service stay, if it has not begun to leave: its own plan is in force again."""
        if self._told and self.departure.call_off():
            self._told, self.departure = False, Departure()

    def join(self) -> None:
        """Waits for the end of the successor, if there is one. Raises the error that ended it while it served."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, service: Service) -> None:
        """Runs the successor. An error before it serves has the worker leave its stage first, and then load again."""
        ended = False
        try:
            service.run()
            ended = True
        except Stopping:
            pass
        except Exception as error:  # noqa: BLE001  # raised by `join`, in the worker's thread
            if service.split:
                self._error = error
            else:
                reason = str(error) if isinstance(error, BlockrelayError) else repr(error)
                get().warning("STAGE_NOT_LOADED_BESIDE", error=reason)
        if self._told or self._links.drain.is_requested:
            return
        if service.is_overtaken or (ended and not service.split):  # or its record was lost
            self.service, self.has_begun = None, False
        else:
            self.failure = "the plan gives this worker another stage, which could not be loaded beside this one"
