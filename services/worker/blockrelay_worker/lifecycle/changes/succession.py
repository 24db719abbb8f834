"""Prepares the stage that another plan gives a worker beside the one that it serves, so that no request waits for it.

The successor is a second worker in the same process: it has a registration, an engine and KV pages of its own. Once all
stages of the plan in force have workers that serve, the first one passes its requests on and goes. With another block
folder the requests that it has begun cannot go on at the successor: it retires, and goes when they have ended.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from blockrelay.errors import BlockFolderError, BlockrelayError, KnownAnswerMismatch, UsageError
from blockrelay.observability.logs import get
from blockrelay.protocol.plan import Plan, Stage, WorkerInfo, is_served, succeeded
from blockrelay.redis.registry import read_workers
from blockrelay_worker.lifecycle.changes.retirement import Retirement
from blockrelay_worker.transport.events import Departure
from blockrelay_worker.transport.redis_links import Links, Stopping

#: Seconds between two looks whether all stages of the plan are served: each reads the records of all workers. With
#: more than 16 they are further apart, because all of these look.
LOOK_S = 0.5
#: Share of its time that a worker may spend on such looks: a worker that retires reads all unfinished requests.
LOOK_SHARE = 0.1


class Service(Protocol):
    """A worker's service of one stage, which `run` registers, loads, announces and serves until its end."""

    split: str
    """The stages of the model of which it serves one; empty before it has announced that."""

    @property
    def is_overtaken(self) -> bool:
        """Whether it leaves because another plan came before it could take over from the present service."""
        ...

    def run(self) -> None:
        """Registers, loads and serves. Returns soon after a drain of the worker was requested."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """What a plan gives a worker to serve."""

    blocks: Stage
    folder: str
    """Key of the block folder."""


class Succession:
    """The change of one service of a stage for another one. The heartbeat's thread calls it, and `join` the worker's.

    `folder` is the key of the block folder that is served now. `make` returns the service of a place, None where there
    is no room for both, or `later`: it is to be asked again.
    """

    def __init__(
        self,
        links: Links,
        model: str,
        folder: str,
        retirement: Retirement,
        make: Callable[[Place], Service | Literal["later"] | None],
    ) -> None:
        self._links, self._model, self._folder, self._make = links, model, folder, make
        self._retirement = retirement
        self._told, self._next_look = False, 0.0  # monotonic
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._alone = ""  # why it must leave its stage before it can load another one
        self._place: Place | None = None  # the one to take
        self._refused = False  # its blocks cannot be served
        self.has_begun = False
        #: The leave of the present service, once `is_over` has returned True.
        self.departure = Departure()
        #: Why the worker must leave its stage now, to load another one then; None: it need not.
        self.failure: str | None = None
        #: The successor, once there is one.
        self.service: Service | None = None

    def begin(self, place: Place) -> None:
        """Starts the successor in a thread of its own, after the end of one that was overtaken.

        Raises RedisTrouble; then it has not begun. A place whose blocks cannot be served is refused: the worker stays.
        """
        if self._thread is not None:
            self._thread.join()
        try:
            made = self._make(place)
        except (BlockFolderError, UsageError) as error:
            self._refuse(place, error)
            return
        if made == "later":
            return
        self.service, self.has_begun, self._place = made, True, place
        if self.service is None:
            self._leave_first("the plan gives this worker another stage, and there is no room for both")
            return
        self._thread = threading.Thread(target=self._run, args=(self.service,), name="successor", daemon=True)
        self._thread.start()

    def is_over(self, plan: Plan) -> bool:
        """Returns True once: when the successor and workers of all other stages of `plan` serve, and no request needs
        the present service. Sets `failure` where it has to leave first, and no request needs it."""
        service = self.service
        if self._told or (not self._alone and (service is None or service.is_overtaken or not service.split)):
            return False
        if (began := time.monotonic()) < self._next_look:
            return False
        workers = read_workers(self._links.control, self._links.keys, self._model)
        self._next_look = time.monotonic() + LOOK_S * max(1.0, len(workers) / 16)
        try:
            return self._look(service, plan, workers)
        finally:
            took_s = time.monotonic() - began
            self._next_look = max(self._next_look, time.monotonic() + took_s * (1 / LOOK_SHARE - 1))

    def _look(self, service: Service | None, plan: Plan, workers: Sequence[WorkerInfo]) -> bool:
        """Does what `is_over` says, by the records of all `workers` of the model."""
        if self._alone:
            if self._retirement.is_complete(plan, workers):
                self.failure = self._alone
            return False
        if service is None or not self._is_relieved(service.split, plan, workers):
            return False
        self._told = not self._changes_folder or self._retirement.is_complete(plan, workers)
        return self._told

    def call_off(self) -> None:
        """Has the present service stay, if it has not begun to leave: its own plan is in force again."""
        if self._told and self.departure.call_off():
            self._told, self.departure = False, Departure()
        if not self._told and self.failure is None:
            self._retirement.call_off()
            if self._alone or self._refused:
                self._alone, self._refused, self.has_begun = "", False, False

    def join(self) -> None:
        """Waits for the end of the successor, if there is one. Raises the error that ended it while it served."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def _changes_folder(self) -> bool:
        return self._place is not None and self._place.folder != self._folder

    def _is_relieved(self, split: str, plan: Plan, workers: Sequence[WorkerInfo]) -> bool:
        """Returns whether the successor, which serves a stage of `split`, and others could form a route.

        By the plan in force these are workers that stay. Where yet another plan has come, one of both makes room for
        its stage: the present one, if only the successor's route is whole (see `StageService._successor`).
        """
        leaving, here = succeeded(workers), self._retirement
        follower = next((one for one in workers if one.succeeds == here.worker_id), None)
        if follower is None:
            return False
        folder = plan.folder_of(follower.id) or self._model
        if (split, follower.folder) == (plan.split, folder):
            return is_served(split, [one for one in workers if one.id not in leaving], numerics=follower.numerics)
        goes_on = is_served(split, workers, numerics=follower.numerics)
        return goes_on and not is_served(here.split, workers, numerics=here.numerics)

    def _leave_first(self, why: str) -> None:
        """Has the worker leave its stage before it loads another one, because of `why`."""
        if self._changes_folder:
            self._alone = why
        else:
            self.failure = why

    def _refuse(self, place: Place, error: BlockrelayError) -> None:
        """Has the worker serve what it serves until its own place is in force again: no start could serve this one."""
        get().error("FOLDER_REFUSED", folder=place.folder, error=str(error))
        self._place, self._refused, self.has_begun = place, True, True

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
            elif self._changes_folder and self._place and isinstance(error, BlockFolderError | KnownAnswerMismatch):
                self.service = None
                self._refuse(self._place, error)
                return
            else:
                reason = str(error) if isinstance(error, BlockrelayError) else repr(error)
                get().warning("STAGE_NOT_LOADED_BESIDE", error=reason)
        if self._told or self._links.drain.is_requested:
            return
        if service.is_overtaken or (ended and not service.split):  # or its record was lost
            self.service, self.has_begun = None, False
        else:
            self._leave_first("the plan gives this worker another stage, which could not be loaded beside this one")
