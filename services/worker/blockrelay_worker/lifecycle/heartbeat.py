"""The worker's heartbeat, in a thread of its own, which also compares the runs in Redis with those of the engine."""

import os
import threading
import time
from collections.abc import Callable

from blockrelay.errors import RedisTrouble
from blockrelay.exit_codes import BROKEN
from blockrelay.observability.logs import get
from blockrelay.protocol.block_times import BlockTimes
from blockrelay.protocol.capabilities import Pace
from blockrelay.protocol.messages import Ended
from blockrelay.protocol.plan import Plan, parse_split
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import server_run_id
from blockrelay.redis.registry import read_plan
from blockrelay_worker.engine.stage_role import StageRole
from blockrelay_worker.kv.run_table import RunTable
from blockrelay_worker.lifecycle.changes.succession import Place, Succession
from blockrelay_worker.lifecycle.registration import rows_arrive
from blockrelay_worker.policy import FREE_MEMORY_S, INBOX_TTL_S
from blockrelay_worker.transport.events import Event, Gone, MovesOn, Orphan, Restarted
from blockrelay_worker.transport.mailbox import Mailbox
from blockrelay_worker.transport.redis_links import Links


def compare(
    here_before: dict[str, str], here_after: dict[str, str], there: dict[str, str]
) -> tuple[tuple[tuple[str, str], ...], frozenset[tuple[str, str]]]:
    """Compares run tables (request id -> run id) of this worker with the one in Redis, `there`.

    Returns pairs of (request id, run id): the runs that only this worker has, which have ended; and those that only
    Redis has, which are orphans if two heartbeats in a row see them. `here_before` was read before Redis was asked and
    `here_after` after it answered. A run claimed in between is in neither result, and one dropped in between is no
    orphan. A request with an empty run id in `there` is no orphan.
    """
    ended = tuple((q, r) for q, r in here_before.items() if there.get(q) != r)
    strange = {(q, r) for q, r in there.items() if r} - here_before.items() - here_after.items()
    return ended, frozenset(strange)


class Heartbeat(threading.Thread):
    """Sends a heartbeat every `every_s` seconds until `stop` is set or the worker is gone, and tells the engine.

    Events for the engine go to `mailbox`. `run_id` is that of the control Redis that the worker registered with:
    another one means that Redis restarted. `model` is the model's key in Redis, and `folder` that of the block folder
    that is served. `pace` returns the measured speed, and `blocks` the times of the stage's blocks, None before they
    are known and where they are as before.

    When a step's age exceeds `step_limit_s`, the process ends: a stuck worker must not look alive. While the number of
    finished parts of long steps grows, the heartbeat says that the step makes progress. `succession` prepares another
    stage that the plan gives this worker. `memory` returns the bytes that the stage holds, and those that are free; it
    is asked every FREE_MEMORY_S seconds.
    """

    def __init__(
        self,
        links: Links,
        mailbox: Mailbox[Event],
        role: StageRole,
        table: RunTable,
        *,
        run_id: str,
        model: str,
        folder: str,
        pace: Callable[[], Pace | None],
        blocks: Callable[[], BlockTimes | None],
        every_s: float,
        step_limit_s: Callable[[], float],
        stop: threading.Event,
        memory: Callable[[], tuple[int, int]],
        succession: Succession,
    ) -> None:
        super().__init__(name="beat", daemon=True)
        self._links, self._mailbox, self._role, self._table = links, mailbox, role, table
        self._model, self._folder, self._pace, self._parts_before = model, folder, pace, 0
        self._blocks = blocks
        self._every_s, self._step_limit_s, self._stopped = every_s, step_limit_s, stop
        self._strange: frozenset[tuple[str, str]] = frozenset()
        self._run_id, self._succession = run_id, succession
        self._memory, self._memory_at = memory, float("-inf")  # monotonic

    def run(self) -> None:
        """Sends heartbeats until `stop` is set or the worker is gone.

        When the worker is gone, the mailbox gets a Gone with the reason. Ends the process with the exit
        code BROKEN when a step takes longer than its limit.
        """
        while not self._stopped.wait(self._every_s):
            # In this order, so that an age is never compared with the limit of a later step.
            limit_s, age_s = self._step_limit_s(), self._links.clock.age()
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
        return not rows_arrive(self._role.split) or bool(
            self._links.payload.expire(self._links.keys.inbox(self._role.worker_id), INBOX_TTL_S)
        )

    def _send(self) -> str | None:
        """Sends one heartbeat. Returns the reason why this worker is gone, or None. Raises RedisTrouble."""
        run_id = server_run_id(self._links.control)
        if run_id != self._run_id:
            self._mailbox.put(Restarted())
        self._run_id = run_id
        if not self._rows_arrive():
            return "the payload inbox is gone"
        worker_id, before = self._role.worker_id, self._table.view
        parts, parts_before = self._links.clock.parts, self._parts_before
        blocks, now = self._blocks(), time.monotonic()
        tells_memory = now - self._memory_at >= FREE_MEMORY_S
        there = self._links.scripts.run(
            calls.heartbeat(
                worker_id,
                self._pace(),
                pages_used=self._table.pool.used_pages,
                goes_on=parts > parts_before,
                block_times=blocks.to_json() if blocks else "",
                memory=self._memory() if tells_memory else None,
            )
        )
        self._memory_at = now if tells_memory else self._memory_at
        self._parts_before = parts
        if there is None:
            return "declared dead"
        ended, strange = compare(before, self._table.view, there)
        for request_id, run in ended:
            self._mailbox.put(Ended(request_id=request_id, run_id=run))
        if self._role.first_stage:  # it claims runs; a run that a later stage has not seen is still on its way
            for request_id, run in strange & self._strange:
                self._mailbox.put(Orphan(request_id, run))
            self._strange = strange
        plan = read_plan(self._links.control, self._links.keys, self._model)
        return self._follow(plan) if plan else None

    def _follow(self, plan: Plan) -> str | None:
        """Has a successor prepared if the plan gives this worker another stage, and tells the engine once it may go.

        Returns the reason why the worker must go at once, or None.
        """
        mine = plan.assignments.get(self._role.worker_id)
        folder = plan.folder_of(self._role.worker_id) or self._model
        here = (self._role.stage, self._role.split, self._folder)
        moves = mine is not None and (mine, plan.split, folder) != here
        if moves and mine is not None and not self._succession.has_begun:
            self._succession.begin(Place(parse_split(plan.split)[mine], folder))
        if self._succession.is_over(plan):
            self._mailbox.put(MovesOn(self._succession.departure))
        elif not moves and (plan.split, plan.folder or self._model) == here[1:]:
            self._succession.call_off()
        return self._succession.failure
