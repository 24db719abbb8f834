"""How a worker enters the registry: register, wait for a plan that names it, announce that it is ready."""

import os
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockrelay.failpoints import reach
from blockrelay.logs import get
from blockrelay.plan import Plan, Stage, parse_split
from blockrelay.redis_link import UNREACHABLE, backoff_s, server_run_id
from blockrelay.registry import read_plan, server_ms
from blockrelay.settings import Device
from blockrelay_worker.links import Links, Stopping

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the plan gives this worker."""

    split: str
    stage: int
    blocks: Stage
    epoch: int


class Registration:
    """One life in the registry. A worker that was declared dead makes a new one, under a new id."""

    def __init__(
        self, links: Links, *, model: str, device: Device, numerics: str, host: str, port: int, threads: int
    ) -> None:
        self.worker = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._links, self._model = links, model
        self._fields: Mapping[Any, Any] = {
            "model": model,
            "device": device,
            "numerics": numerics,
            "host": host,
            "pid": os.getpid(),
            "port": port,
            "registered": server_ms(),
            "node": socket.gethostname(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            "threads": threads,
        }

    def wait_for_assignment(self) -> Assignment:
        """Register and poll the plan until it names this worker. Raises Stopping when the process should end."""
        self._enter()
        get().info("WORKER_REGISTERED", worker=self.worker, device=self._fields["device"])
        while not self._links.stop.wait(POLL_S):
            self._links.again(self._sign_of_life)
            plan: Plan | None = self._links.again(lambda: read_plan(self._links.control, self._links.keys, self._model))
            if plan and self.worker in plan.assignments:
                stage = plan.assignments[self.worker]
                return Assignment(plan.split, stage, parse_split(plan.split)[stage], plan.epoch)
        raise Stopping

    def announce(self, assignment: Assignment, *, pages: int, slots: int) -> str:
        """Say what this worker serves (`slots` requests at once), create its inboxes: from now on routes may name it.

        Returns the identity of the control Redis from before: any other one later means a restart in between.
        """
        keys = self._links.keys
        run_id: str = self._links.again(lambda: server_run_id(self._links.control))
        fields: Mapping[Any, Any] = {
            "split": assignment.split,
            "stage": assignment.stage,
            "first": assignment.blocks.first,
            "last": assignment.blocks.last,
            "epoch": assignment.epoch,
            "pages": pages,
            "slots": slots,
            "reserved": 0,
        }
        self._links.again(lambda: self._links.payload.xadd(keys.inbox(self.worker), {"hello": self.worker}))
        self._links.again(
            lambda: self._links.control.hset(keys.worker(self.worker), mapping={**self._fields, **fields})
        )
        self._links.again(self._sign_of_life)
        self._links.again(self._open_inbox)
        return run_id

    def _open_inbox(self) -> None:
        reach("worker.before_announce")
        self._links.control.xadd(self._links.keys.inbox(self.worker), {"hello": self.worker})
        reach("worker.after_announce")

    def leave_payload(self) -> None:
        """Delete the inbox on the payload Redis; what is left in it belongs to runs that are over."""
        try:
            self._links.payload.delete(self._links.keys.inbox(self.worker))
        except UNREACHABLE:
            self._links.errors.inc()  # it has a time to live

    def _enter(self) -> None:
        self._links.again(self._write_record)
        self._links.again(self._sign_of_life)

    def _write_record(self) -> None:
        reach("worker.before_register")
        self._links.control.hset(self._links.keys.worker(self.worker), mapping=self._fields)
        reach("worker.after_register")

    def _sign_of_life(self) -> None:
        """A beat before the inbox exists, when BEAT would say that we are gone."""
        seconds, micros = self._links.control.time()
        self._links.control.zadd(self._links.keys.workers, {self.worker: seconds * 1000 + micros // 1000})


class LoadingBeat:
    """Signs of life from a thread of its own while blocks are loaded: `with LoadingBeat(...): load()`."""

    def __init__(self, registration: Registration, links: Links, every_s: float) -> None:
        self._registration, self._links, self._every_s = registration, links, every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loading beat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        attempt = 0
        while not self._done.wait(self._every_s if attempt == 0 else backoff_s(attempt)):
            try:
                self._registration._sign_of_life()  # pyright: ignore[reportPrivateUsage]
                attempt = 0
            except UNREACHABLE:
                attempt += 1
