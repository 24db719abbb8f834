"""The retirement of a worker that gets another block folder: it finishes the requests that it has begun, and goes.

Only workers of one numerics id can go on with a request that has tokens. The last ones that form a route stay until no
such request is left.
"""

from collections.abc import Sequence
from typing import Any, cast

from blockrelay.observability.logs import get
from blockrelay.protocol.plan import Plan, WorkerInfo, is_served, succeeded
from blockrelay_worker.transport.redis_links import Links

#: Records of unfinished requests that are read at once.
READ_AT_ONCE = 500


class Retirement:
    """The retirement of one registered worker. Used by the heartbeat's thread. All methods raise RedisTrouble."""

    def __init__(self, links: Links, model: str, worker_id: str, *, split: str, folder: str, numerics: str) -> None:
        """`model` and `folder` are keys. `split` has the stages of which the worker serves one."""
        self._links, self._model, self.worker_id = links, model, worker_id
        self._split, self._folder, self._numerics = split, folder, numerics
        self._has_begun = False

    def is_complete(self, plan: Plan, workers: Sequence[WorkerInfo]) -> bool:
        """Begins the retirement with the first call, and returns whether the worker may go.

        It may when workers that `plan` leaves with its folder could take its requests over, or when no unfinished
        request needs its numerics id. `workers` are those of the model.
        """
        if not self._has_begun:
            self._mark()
            return False  # workers that retire at the same moment are seen in the next look
        leaving = succeeded(workers)
        staying = [
            one
            for one in workers
            if one.numerics == self._numerics
            and one.id not in leaving
            and one.id in plan.assignments
            and (plan.folder_of(one.id) or self._model) == self._folder
        ]
        return is_served(self._split, staying, numerics=self._numerics) or not self._is_needed()

    def call_off(self) -> None:
        """Ends the retirement, if it has begun: the worker takes new requests again."""
        if self._has_begun:
            self._links.control.hdel(self._links.keys.worker(self.worker_id), "retires")
            self._has_begun = False

    def _mark(self) -> None:
        """Writes into the worker's record, if there still is one, that it takes nothing new."""
        record = self._links.keys.worker(self.worker_id)
        if self._links.control.exists(record):
            self._links.control.hset(record, "retires", 1)
            get().info("WORKER_RETIRES", worker=self.worker_id, numerics=self._numerics)
        self._has_begun = True

    def _is_needed(self) -> bool:
        """Returns whether a request runs on this worker, or can only go on under its numerics id."""
        control, keys = self._links.control, self._links.keys
        if control.scard(keys.worker_requests(self.worker_id)):
            return True
        unfinished = cast(list[bytes], control.zrange(keys.running, 0, -1))
        for first in range(0, len(unfinished), READ_AT_ONCE):
            ask = control.pipeline(transaction=False)
            for request_id in unfinished[first : first + READ_AT_ONCE]:
                ask.hmget(keys.request(request_id.decode()), "model", "state", "committed", "numerics", "varies")
            for model, state, committed, numerics, varies in cast(Any, ask.execute()):
                begun = state == b"running" or int(committed or 0) > 0
                if model == self._model.encode() and begun and varies != b"1" and _last(numerics) == self._numerics:
                    return True
        return False


def _last(numerics: bytes | None) -> str:
    """Returns the numerics id under which a log goes on: `b` of `a+b@17`."""
    return (numerics or b"").decode().rpartition("+")[2].partition("@")[0]
