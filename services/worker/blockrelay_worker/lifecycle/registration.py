"""Enters a worker in the registry: it registers, waits for a plan that names it, and announces that it is ready."""

import os
import secrets
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from blockrelay.errors import RedisTrouble
from blockrelay.failpoints import reach
from blockrelay.host.cpu import cores
from blockrelay.host.identity import host_name, process_prefix
from blockrelay.observability.logs import get
from blockrelay.protocol.capabilities import Capabilities
from blockrelay.protocol.constants import MAX_WORKERS
from blockrelay.protocol.number import LOWEST_PROTOCOL, PROTOCOL
from blockrelay.protocol.plan import Plan, Stage, parse_split
from blockrelay.protocol.served_folder import ServedFolder, folders_to_json
from blockrelay.protocol.transitions import calls
from blockrelay.redis.client import backoff_s, server_run_id
from blockrelay.redis.registry import read_plan, server_ms
from blockrelay.settings import WorkerSettings
from blockrelay_worker.policy import INBOX_TTL_S, PLAN_POLL_S, REGISTER_RETRY_S
from blockrelay_worker.transport.redis_links import Links, Stopping


def rows_arrive(split: str) -> bool:
    """Returns whether workers of a split such as `1-9,10-18` send each other rows.

    A worker with the whole model needs no payload Redis.
    """
    return "," in split


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """The stage that the plan gives this worker."""

    split: str
    """First and last block of each stage, such as `1-9,10-18`."""
    stage: int
    """Index of the stage in the split, from 0."""
    blocks: Stage
    epoch: int
    """Epoch of the plan."""
    folder: str = ""
    """Key of the block folder; "": the one that the worker starts with."""

    def holds(self, other: "StageAssignment") -> bool:
        """Returns whether both are the same blocks of the same folder."""
        return (self.blocks, self.folder) == (other.blocks, other.folder)


class Registration:
    """One registration of a worker. A worker that was declared dead makes a new one, with a new id.

    `worker_id` changes when the record is gone before this worker has a stage.
    """

    def __init__(
        self,
        links: Links,
        settings: WorkerSettings,
        *,
        model: str,
        numerics: str,
        port: int,
        folder: str = "",
        folders: Sequence[ServedFolder] = (),
        nondeterministic: bool = False,
        slow: str = "",
        loads_beside: bool = False,
        succeeds: str = "",
    ) -> None:
        """Collects the fields of the worker's record; nothing is sent yet.

        `model` is the model's key in Redis, `folder` that of the block folder that the worker would serve (by default
        the model's own), `folders` are all that it has, and `numerics` is the numerics id with the first. `port` is
        that of the worker's status server. `nondeterministic`: its device is nondeterministic. `slow`: a line for
        users that says why it computes more slowly than its CPU can. `loads_beside`: it can load another stage beside
        its own. `succeeds`: the id of the worker of this process whose place in the plan it takes.
        """
        self.worker_id = _new_id()
        self._links, self._model, self._beat_s = links, model, settings.beat_s
        self._fields: Mapping[Any, Any] = {
            #: The lowest protocol: services of the release before must be able to read this record.
            "v": LOWEST_PROTOCOL,
            "protocol": PROTOCOL,
            "model": model,
            "device": settings.device,
            "device_id": settings.named_device,
            "folder": folder or model,
            **({"folders": folders_to_json(folders)} if folders else {}),
            "numerics": numerics,
            "host": settings.host,
            "pid": os.getpid(),
            "port": port,
            "registered_ms": server_ms(),
            "node": host_name(),
            "cores": cores(),
            "threads": settings.threads,
            "varies": int(nondeterministic),
            **({"slow": slow} if slow else {}),
            **({"loads_beside": 1} if loads_beside else {}),
            **({"succeeds": succeeds} if succeeds else {}),
        }

    def wait_for_assignment(
        self,
        given_up: Callable[[], bool] = lambda: False,
        may_take: Callable[[StageAssignment], bool] = lambda _: True,
    ) -> StageAssignment:
        """Registers, and polls the plan until it names this worker, with a stage that `may_take` accepts.

        Raises Stopping when the process should end, when `given_up` returns True, and for a successor that finds no
        room in the cell.

        Registers again, with a new id, when the record is gone (declared dead, or lost by Redis): no plan names a
        worker without a record.
        """
        self._enter()
        while not self._links.stop.wait(PLAN_POLL_S) and not given_up():
            if self.forgotten():
                self.worker_id = _new_id()
                self._enter()
            if (place := self.place()) is not None and may_take(place):
                return place
        raise Stopping

    def place(self) -> StageAssignment | None:
        """Returns the stage that the plan in force gives this worker, if it names it.

        Raises Stopping when the process should end before Redis answers.
        """
        plan: Plan | None = self._links.retry_until_reachable(
            lambda: read_plan(self._links.control, self._links.keys, self._model), "read plan"
        )
        if plan is None or self.worker_id not in plan.assignments:
            return None
        stage = plan.assignments[self.worker_id]
        blocks, folder = parse_split(plan.split)[stage], plan.folder_of(self.worker_id)
        return StageAssignment(plan.split, stage, blocks, plan.epoch, folder)

    def tell_shortage(self, folder: str, folders: Sequence[ServedFolder], free_bytes: int) -> None:
        """Writes into the record that memory lacks for this worker's stage of `folder`, a key.

        `folders` are all that it has, with what the stage needs of each. Raises Stopping when the process should end
        before Redis answers.
        """
        fields = {"short_of": folder, "folders": folders_to_json(folders), "free_bytes": free_bytes, "held_bytes": 0}
        # The whole record: if Redis has lost it meanwhile, readers would leave out one without the other fields.
        self._links.retry_until_reachable(lambda: self._tell({**self._fields, **fields}), "announce")

    def withdraw_shortage(self) -> None:
        """Removes from the record that memory lacks: the stage is loaded now. Raises what `tell_shortage` raises."""
        record = self._links.keys.worker(self.worker_id)
        self._links.retry_until_reachable(lambda: self._links.control.hdel(record, "short_of"), "announce")

    def announce(
        self,
        assignment: StageAssignment,
        *,
        pages: int,
        slots: int,
        served: Mapping[str, str | int] | None = None,
        capabilities: Capabilities | None = None,
        local_rows: str = "",
    ) -> str:
        """Writes the worker's stage to its record and creates its inboxes: from now on routes may include it.

        `pages` are its KV pages, `slots` the requests it takes at once, `local_rows` the address where it takes rows
        of workers on its host, if it does. `served` are the fields of the block folder that it serves, and of those
        that it could serve.

        Returns the run id of the control Redis, read before all this: a different one later means a restart. Raises
        Stopping when the process should end before Redis answers.
        """
        run_id: str = self._links.retry_until_reachable(lambda: server_run_id(self._links.control), "announce")
        fields: dict[Any, Any] = {
            "split": assignment.split,
            "stage": assignment.stage,
            "first_block": assignment.blocks.first,
            "last_block": assignment.blocks.last,
            "epoch": assignment.epoch,
            "pages": pages,
            "slots": slots,
            "pages_reserved": 0,
            **(served or {}),
        }
        if capabilities is not None:
            fields["capabilities"] = capabilities.to_json()
        if local_rows:
            fields["local_rows"] = local_rows
        if rows_arrive(assignment.split):
            self._links.retry_until_reachable(self._open_payload_inbox, "open payload inbox")
        self._links.retry_until_reachable(lambda: self._tell({**self._fields, **fields}), "announce")
        self._links.retry_until_reachable(self._sign_of_life, "announce")
        self._links.retry_until_reachable(self._open_inbox, "announce")
        return run_id

    def _open_payload_inbox(self) -> None:
        inbox = self._links.keys.inbox(self.worker_id)
        both = self._links.payload.pipeline(transaction=False)
        both.xadd(inbox, {"hello": self.worker_id})
        if self._links.payload is not self._links.control:  # on the control Redis the inbox stays until DEAD
            both.expire(inbox, INBOX_TTL_S)
        both.execute()

    def _tell(self, fields: Mapping[Any, Any]) -> None:
        """Writes the record, and deletes the cached fleet so that readers of the registry see the change."""
        both = self._links.control.pipeline(transaction=True)
        both.hset(self._links.keys.worker(self.worker_id), mapping=fields)
        if "short_of" not in fields:
            both.hdel(self._links.keys.worker(self.worker_id), "short_of")
        both.delete(self._links.keys.fleet(self._model))
        both.execute()

    def _open_inbox(self) -> None:
        reach("worker.before_announce")
        self._links.control.xadd(self._links.keys.inbox(self.worker_id), {"hello": self.worker_id})
        reach("worker.after_announce")

    def leave(self, split: str) -> None:
        """Leaves the registry in one try, so that the requests of this worker run again elsewhere.

        `split` has the stages of which it served one; "": none. If Redis fails, nothing is raised.
        """
        try:
            self._links.scripts.run(calls.dead(self.worker_id, silent_s=0, reason="drain"))
        except RedisTrouble as error:
            self._links.watch.count_error(error)  # the scheduler will notice the missing heartbeats
        if rows_arrive(split):
            self._leave_payload()

    def _leave_payload(self) -> None:
        """Deletes the inbox on the payload Redis; messages left in it belong to runs that have ended."""
        try:
            self._links.payload.delete(self._links.keys.inbox(self.worker_id))
        except RedisTrouble as error:
            self._links.watch.count_error(error)  # it has a time to live

    def forgotten(self) -> bool:
        """Returns True if this worker's record is gone; otherwise this counts as a heartbeat.

        Raises Stopping when the process should end before Redis answers.
        """
        if self._links.retry_until_reachable(self._sign_of_life, "register"):
            return False
        get().warning("WORKER_FORGOTTEN", worker=self.worker_id)
        return True

    @contextmanager
    def kept_alive(self) -> Generator[None]:
        """Sends heartbeats from another thread while the `with` block, which loads a stage, runs.

        While Redis fails, they are tried again; nothing is raised.
        """
        done = threading.Event()
        thread = threading.Thread(target=self._beat_until, args=(done,), name="loading beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _beat_until(self, done: threading.Event) -> None:
        attempt = 0
        while not done.wait(self._beat_s if attempt == 0 else backoff_s(attempt)):
            try:
                self._sign_of_life()
                attempt = 0
                self._links.watch.worked("loading beat")
            except RedisTrouble as error:
                self._links.watch.failed("loading beat", error)
                attempt += 1
        self._links.watch.worked("loading beat")

    def _enter(self) -> None:
        was_logged = False
        while not self._links.retry_until_reachable(self._write_record, "register"):
            if not was_logged:
                was_logged = True
                get().warning("CELL_FULL", limit=MAX_WORKERS, reason="the cell has no room for another worker; waiting")
            if "succeeds" in self._fields or self._links.stop.wait(REGISTER_RETRY_S):
                raise Stopping
        get().info("WORKER_REGISTERED", worker=self.worker_id, device=self._fields["device"])

    def _write_record(self) -> bool:
        """Writes the record and the first heartbeat together. Returns False, undoing both, if the cell is full."""
        keys, control = self._links.keys, self._links.control
        reach("worker.before_register")
        both = control.pipeline(transaction=True)
        both.hset(keys.worker(self.worker_id), mapping=self._fields)
        both.zadd(keys.workers, {self.worker_id: self._now_ms()})
        both.zcard(keys.workers)
        *_, workers = both.execute()
        if workers > MAX_WORKERS:
            both.delete(keys.worker(self.worker_id))
            both.zrem(keys.workers, self.worker_id)
            both.execute()
            return False
        reach("worker.after_register")
        return True

    def _sign_of_life(self) -> bool:
        """Sends a heartbeat without BEAT, which fails before the inbox exists. Returns False if there is no record."""
        keys, control = self._links.keys, self._links.control
        beat = control.pipeline(transaction=True)
        beat.exists(keys.worker(self.worker_id))
        beat.zadd(keys.workers, {self.worker_id: self._now_ms()})
        known, _ = beat.execute()
        if not known:
            control.zrem(keys.workers, self.worker_id)
        return bool(known)

    def _now_ms(self) -> int:
        seconds, micros = cast(Any, self._links.control.time())
        return seconds * 1000 + micros // 1000


def _new_id() -> str:
    return process_prefix(os.getpid()) + secrets.token_hex(4)
