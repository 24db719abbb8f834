"""Stores tensor results, and KV that clients asked for, on the payload Redis, and hands on their commits after that."""

import threading
import time
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from blockrelay.failpoints import reach
from blockrelay.protocol.constants import RESULT_S
from blockrelay.protocol.messages import Commit
from blockrelay.protocol.tensors import encode_result
from blockrelay_worker.policy import PAGES_TOGETHER
from blockrelay_worker.transport.committer import Committer
from blockrelay_worker.transport.redis_links import Links, Stopping

#: Logits float32 [n, vocab] in parts, with their commit; an event, to be set once everything before it is handed on;
#: None: the end.
_Item = tuple[list[NDArray[np.float32]], Commit] | threading.Event | None


class TensorResultWriter(threading.Thread):
    """Stores each tensor result before it submits the commit, so that a reader who sees the end finds the result.

    It is a thread of its own: a result of a hundred megabytes, or a payload Redis that does not answer, delays neither
    the engine nor other requests' commits.
    """

    def __init__(self, links: Links, committer: Committer) -> None:
        super().__init__(name="results", daemon=True)
        self._links, self._committer = links, committer
        self._queue: SimpleQueue[_Item] = SimpleQueue()

    def submit(self, logits: list[NDArray[np.float32]], commit: Commit) -> None:
        """Queues a result and its commit. Returns at once.

        `logits` are its parts, at least one, each float32 [n, vocab]; they must not change afterwards. Both are dropped
        if the process should end before the payload Redis answers.
        """
        self._queue.put((logits, commit))

    def store_kv(self, request_id: str, fields: Mapping[str, bytes]) -> None:
        """Stores KV that request `request_id` asked for where the gateway reads it. Called in the engine thread.

        `fields` have the bytes of a page and layer by name, as `kv.requested_kv.read_requested` returns them. Waits for
        Redis: the KV must be there before the last stage commits. Raises Stopping when the process should
        end meanwhile.
        """
        key = self._links.keys.kv_asked(request_id)

        def store() -> None:
            reach("worker.before_result")
            names = list(fields)
            for start in range(0, len(names), PAGES_TOGETHER):
                together = self._links.payload.pipeline(transaction=True)  # so that no field is without a TTL
                some = {name: fields[name] for name in names[start : start + PAGES_TOGETHER]}
                together.hset(key, mapping=cast(Any, some))
                together.expire(key, RESULT_S)
                together.execute()

        self._links.retry_until_reachable(store, "store KV")

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was submitted, here and to the committer, is answered, or dropped at the process's end.

        False if `timeout_s` seconds passed first.
        """
        until, handed_on = time.monotonic() + timeout_s, threading.Event()
        self._queue.put(handed_on)
        return handed_on.wait(timeout_s) and self._committer.flush(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Ends the thread after everything submitted is handed on. Returns at once."""
        self._queue.put(None)

    def run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            logits, commit = item
            try:
                self._store(commit.request_id, encode_result(np.concatenate(logits)))
            except Stopping:
                continue
            self._committer.submit([commit])
            del item, logits

    def _store(self, request_id: str, value: bytes) -> None:
        def store() -> None:
            reach("worker.before_result")
            self._links.payload.set(self._links.keys.result(request_id), value, ex=RESULT_S)
            reach("worker.after_result")

        self._links.retry_until_reachable(store, "store result")
