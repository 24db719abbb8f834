"""The worker's heartbeat, in a thread of its own, which also compares the runs in Redis with those of the engine."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from blockrelay.errors import RedisTrouble
from blockrelay.exit_codes import BROKEN
from blockrelay.observability.logs import get
from blockrelay.protocol.capabilities import Pace
from blockrelay.protocol.messages import Ended
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import server_run_id
from blockrelay.redis.registry import read_plan
from blockrelay_worker.lifecycle.registration import rows_arrive
from blockrelay_worker.policy import INBOX_TTL_S
from blockrelay_worker.transport.events import Event, Gone, Orphan, Restarted
from blockrelay_worker.transport.mailbox import Mailbox
from blockrelay_worker.transport.redis_links import Links


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between the runs of this worker and those that Redis has for it: (request id, run id) pairs."""

    ended: tuple[tuple[str, str], ...]
    """Runs that only this worker has; it has to drop them."""
    strange: frozenset[tuple[str, str]]
    """Runs that only Redis has; orphans if two heartbeats in a row see them."""


def compare(here_before: dict[str, str], here_after: dict[str, str], there: dict[str, str]) -> Comparison:
    """Compares run tables (request id -> run id) of this worker with the one in Redis, `there`.

    `here_before` was read before Redis was asked and `here_after` after it answered: a run claimed or dropped in
    between is neither ended nor strange.
    """
    ended = tuple((q, r) for q, r in here_before.items() if there.get(q) != r)
    strange = frozenset((q, r) for q, r in there.items() if r and here_before.get(q) != r and here_after.get(q) != r)
    return Comparison(ended, strange)


class Heartbeat(threading.Thread):
    """Sends a heartbeat every `every_s` seconds until `stop` is set or the worker is gone, and tells the engine.

    Events for the engine go to `mailbox`. `view` returns the engine's runs (request id -> run id). `run_id` is that of
    the control Redis that the worker registered with: another one means that Redis restarted.

    `pace` returns the measured speed, None before it is known; `pages_used` returns the number of KV pages in use.

    When `step_age` (seconds) exceeds `step_limit_s`, the process ends: a stuck worker must not look alive. `parts`
    returns the number of finished parts of long steps: while it grows, the heartbeat says that the step makes progress.
    """

    def __init__(
        self,
        links: Links,
        mailbox: Mailbox[Event],
        *,
        worker_id: str,
        run_id: str,
        model: str,
        split: str,
        stage: int,
        view: Callable[[], dict[str, str]],
        step_age: Callable[[], float],
        parts: Callable[[], int],
        pace: Callable[[], Pace | None],
        pages_used: Callable[[], int],
        every_s: float,
        step_limit_s: Callable[[], float],
        stop: threading.Event,
    ) -> None:
        super().__init__(name="beat", daemon=True)
        self._links, self._mailbox = links, mailbox
        self._worker, self._model, self._split, self._stage = worker_id, model, split, stage
        self._view, self._step_age, self._pace, self._pages_used = view, step_age, pace, pages_used
        self._every_s, self._step_limit_s, self._stopped = every_s, step_limit_s, stop
        self._parts, self._parts_before = parts, 0
        self._strange: frozenset[tuple[str, str]] = frozenset()
        self._run_id = run_id

    def run(self) -> None:
        while not self._stopped.wait(self._every_s):
            # In this order, so that an age is never compared with the limit of a later step.
            limit_s, age_s = self._step_limit_s(), self._step_age()
            if age_s > limit_s:
                get().error("WORKER_STUCK", seconds=round(age_s, 1), limit=round(limit_s, 1))
                os._exit(BROKEN)
            try:
                why = self._send()
            except RedisTrouble as error:
                self._links.watch.failed("beat", error)
                continue
            self._links.watch.worked("beat")
            if why:
                self._mailbox.put(Gone(why))
                return

    def _rows_arrive(self) -> bool:
        """Returns whether this worker's inbox on the payload Redis exists, and renews its expiry (INBOX_TTL_S).

        Called before BEAT: in a route of several stages a worker that no rows reach must not look alive. A worker of
        the whole model gets no rows and needs no payload Redis: True.
        """
        return not rows_arrive(self._split) or bool(
            self._links.payload.expire(self._links.keys.inbox(self._worker), INBOX_TTL_S)
        )

    def _send(self) -> str | None:
        """Sends one heartbeat. Returns the reason why this worker is gone, or None. Raises RedisTrouble."""
        run_id = server_run_id(self._links.control)
        if run_id != self._run_id:
            self._mailbox.put(Restarted())
        self._run_id = run_id
        if not self._rows_arrive():
            return "the payload inbox is gone"
        before = self._view()
        parts, parts_before = self._parts(), self._parts_before
        there = self._links.scripts.run(
            calls.heartbeat(self._worker, self._pace(), pages_used=self._pages_used(), goes_on=parts > parts_before)
        )
        self._parts_before = parts
        if there is None:
            return "declared dead"
        comparison = compare(before, self._view(), there)
        for request_id, run in comparison.ended:
            self._mailbox.put(Ended(request_id=request_id, run_id=run))
        if self._stage == 0:  # it claims runs; to later stages a run that they have not seen yet is still on its way
            for request_id, run in comparison.strange & self._strange:
                self._mailbox.put(Orphan(request_id, run))
            self._strange = comparison.strange
        plan = read_plan(self._links.control, self._links.keys, self._model)
        mine = plan.assignments.get(self._worker) if plan else None
        if plan and mine is not None and (mine != self._stage or plan.split != self._split):
            return "the plan gives this worker another stage"
        return None
