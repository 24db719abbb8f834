"""Keeps a worker from loading a stage for which memory lacks, where the model has a smaller precision (`degrade`).

The worker says in its record for which block folder it lacks memory. A scheduler then gives the cell a smaller folder,
and the larger one again when there is room: `blockrelay_scheduler.planning.degradation` decides.
"""

import time
from collections.abc import Callable

from blockrelay.errors import NoDeviceMemory
from blockrelay.observability.logs import get
from blockrelay.protocol.plan import Stage
from blockrelay_worker.lifecycle.parts import WorkerParts
from blockrelay_worker.lifecycle.registration import Registration, StageAssignment
from blockrelay_worker.policy import FREE_MEMORY_S, OUT_OF_MEMORY_TWICE_S, PLAN_POLL_S, SHORT_FOR_S, SHORT_PATIENCE_S
from blockrelay_worker.transport.redis_links import Stopping


def is_of_memory(error: Exception) -> bool:
    """Returns whether an error of loading or serving a stage says that memory lacks."""
    return isinstance(error, NoDeviceMemory) or isinstance(error.__cause__, MemoryError)


class MemoryWatch:
    """Whether memory has room for the stages of a worker, in all of its registrations. Any thread may use it.

    It finds that memory lacks where weights and the fewest KV pages exceed what is free, and where the worker or its
    device ran out of memory a short while ago. Without a smaller folder of the model, or permission to change to one,
    it never does. What is free on a device is not looked at: another device may take the stage.
    """

    def __init__(self, parts: WorkerParts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts, self._clock = parts, clock
        # When memory last ran out, and when the device had none in a load, by key of the block folder.
        self._ran_out, self._device_ran_out = dict[str, float](), dict[str, float]()

    def may_change(self, folder: str, blocks: Stage) -> bool:
        """Returns whether the cell may change from `folder` (a key) to one that needs less for these blocks."""
        needs = {one.key: one.bytes for one in self._parts.offers(blocks)}
        return self._parts.settings.degrade == "on" and min(needs.values()) < needs[folder]

    def ran_out(self, folder: str) -> None:
        """Notes that the worker, or its device for the second time, has run out of memory with this folder (a key)."""
        self._ran_out[folder] = self._clock()

    def device_ran_out(self, folder: str) -> None:
        """Notes that the device has run out of memory with this folder (a key) while it loaded a stage."""
        before, now = self._device_ran_out.get(folder), self._clock()
        self._device_ran_out[folder] = now
        if before is not None and now - before < OUT_OF_MEMORY_TWICE_S:
            self.ran_out(folder)

    def has_run_out(self, folder: str) -> bool:
        """Returns whether memory ran out with this folder (a key) a short while ago."""
        at = self._ran_out.get(folder)
        return at is not None and self._clock() - at < SHORT_FOR_S

    def is_well(self) -> None:
        """Notes that a stage was loaded: what ran out before may be tried again."""
        self._ran_out.clear()

    def wait(
        self,
        registration: Registration,
        assignment: StageAssignment,
        given_up: Callable[[], bool],
        may_take: Callable[[StageAssignment], bool],
    ) -> StageAssignment | None:
        """Returns what to load: `assignment`, or what the plan gives the worker while memory lacks for that.

        Another stage is returned once `may_take` accepts it. None if the worker's record is gone. Raises Stopping when
        the process should end, or `given_up` returns True.
        """
        links, since, told, next_s, has_left = self._parts.links, self._clock(), "", 0.0, False
        while (lack := self._lack(assignment)) or (has_left and not may_take(assignment)):
            if self._parts.device:  # its other workers may load another folder meanwhile
                self._parts.device.has_closed()
                has_left = True
            if links.stop.wait(PLAN_POLL_S) or given_up():
                raise Stopping
            if registration.forgotten():
                return None
            place = registration.place() or assignment
            if not place.holds(assignment):
                if may_take(place):
                    assignment, has_left = place, False
                continue
            assignment, key = place, self._parts.folder_of(place.folder).model_key
            if not lack or self._clock() - since < SHORT_PATIENCE_S or (told == key and self._clock() < next_s):
                continue
            if told != key:
                get().warning("MEMORY_LACKS", worker=registration.worker_id, folder=key, reason=lack)
            told, next_s = key, self._clock() + FREE_MEMORY_S
            free = self._parts.free_bytes(self._parts.folder_of(key))
            registration.tell_shortage(key, self._parts.offers(assignment.blocks), free)
        if told:
            registration.withdraw_shortage()
        return assignment

    def _lack(self, assignment: StageAssignment) -> str:
        """Returns why memory has no room for a stage, in words; "": it has, or the worker has no smaller folder."""
        folder, blocks = self._parts.folder_of(assignment.folder), assignment.blocks
        if not self.may_change(folder.model_key, blocks):
            return ""
        if self.has_run_out(folder.model_key):
            return "memory ran out with this folder"
        return self._parts.lack(folder, blocks)
