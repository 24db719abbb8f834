"""The retirement of a worker that gets another block folder: it finishes the requests that it has begun, and goes.

Only workers of one numerics id can go on with a request that has tokens. The last ones that form a route stay until no
such request is left. A request on a GPU may go on under any id, so no script keeps it to this folder: its workers stay
until it has ended. What is decided here is part of the protocol model, `tests/protocol_model/scripts/retiring.py`.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from blockrelay.observability.logs import get
from blockrelay.protocol.plan import Plan, WorkerInfo, is_served, succeeded
from blockrelay_worker.transport.redis_links import Links

#: Records of unfinished requests that are read at once.
READ_AT_ONCE = 500
#: What is read of a request.
_FIELDS = ("model", "state", "committed", "numerics", "varies", "job", "pages_needed", "route")
#: More KV pages than any pool has.
_MORE_THAN_ANY = sys.maxsize


class Retirement:
    """The retirement of one registered worker. Used by the heartbeat's thread. All methods raise RedisTrouble."""

    def __init__(self, links: Links, model: str, worker_id: str, *, split: str, folder: str, numerics: str) -> None:
        """`model` and `folder` are keys. `split` has the stages of which the worker serves one."""
        self._links, self._model, self._folder = links, model, folder
        self.worker_id, self.split, self.numerics = worker_id, split, numerics
        self._has_marked = False

    def is_complete(self, plan: Plan, workers: Sequence[WorkerInfo]) -> bool:
        """Marks the worker as retiring if it is not yet, and else returns whether it may go.

        It may when workers that `plan` leaves with its folder could take its requests over, or when no unfinished
        request needs its numerics id. `workers` are those of the model.
        """
        if not any(one.id == self.worker_id and one.retires for one in workers):  # or Redis has lost that
            self._mark()
            return False  # workers that retire at the same moment are seen in the next look
        mine, leaving = [one for one in workers if one.numerics == self.numerics], succeeded(workers)
        needed = self._pages_needed([replace(one, retires=False) for one in mine])
        staying = [
            one
            for one in mine
            if one.id not in leaving
            and one.id in plan.assignments
            and (plan.folder_of(one.id) or self._model) == self._folder
        ]
        return needed is None or self._could_hold(staying, needed)

    def call_off(self) -> None:
        """Ends the retirement, if it has begun: the worker takes new requests again.

        Call it again later: a Redis that has lost what was written last may say that the worker retires.
        """
        if self._has_marked:
            self._links.control.hdel(self._links.keys.worker(self.worker_id), "retires")

    def _mark(self) -> None:
        """Writes into the worker's record, if there still is one, that it takes nothing new."""
        record = self._links.keys.worker(self.worker_id)
        self._has_marked = True
        if self._links.control.exists(record):
            self._links.control.hset(record, "retires", 1)
            get().info("WORKER_RETIRES", worker=self.worker_id, numerics=self.numerics)

    def _could_hold(self, workers: Sequence[WorkerInfo], pages: int) -> bool:
        """Returns whether `workers` form a route whose pools can hold a request of `pages` KV pages."""
        return is_served(self.split, [one for one in workers if one.pages >= pages], numerics=self.numerics)

    def _pages_needed(self, serving: Sequence[WorkerInfo]) -> int | None:
        """Returns the KV pages of the largest request that can only go on under this worker's numerics id.

        0 where a request runs on this worker and could go on under another one; None where there is neither. More than
        any pool has, where one runs on this worker and would go on under any id (a GPU has a part of it). A request
        that may go on elsewhere, since its id had no workers for a while, counts only while `serving` could hold it:
        else no worker would ever take it, and this one would wait in vain.
        """
        control, keys = self._links.control, self._links.keys
        needed = [0] if control.scard(keys.worker_requests(self.worker_id)) else []
        unfinished = cast(list[bytes], control.zrange(keys.running, 0, -1))
        for first in range(0, len(unfinished), READ_AT_ONCE):
            ask = control.pipeline(transaction=False)
            for request_id in unfinished[first : first + READ_AT_ONCE]:
                ask.hmget(keys.request(request_id.decode()), *_FIELDS)
            for model, state, committed, numerics, varies, job, pages, route in cast(Any, ask.execute()):
                if varies == b"1" and self.worker_id in (route or b"").decode().split(","):
                    return _MORE_THAN_ANY
                begun = state == b"running" or int(committed or 0) > 0
                if model != self._model.encode() or not begun or varies == b"1" or _last(numerics) != self.numerics:
                    continue
                if not (job or b"").startswith(b"reruns") or self._could_hold(serving, int(pages)):
                    needed.append(int(pages))
        return max(needed, default=None)


def _last(numerics: bytes | None) -> str:
    """Returns the numerics id under which a log goes on: `b` of `a+b@17`."""
    return (numerics or b"").decode().rpartition("+")[2].partition("@")[0]
