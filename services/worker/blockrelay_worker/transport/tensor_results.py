"""Tensor outputs, and KV that was asked for, on their way to the payload Redis, and the COMMITs that announce them."""

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
from blockrelay_worker.transport.committer import Committer
from blockrelay_worker.transport.redis_links import Links, Stopping

#: Pages of KV in one command: a few megabytes.
PAGES_TOGETHER = 64
#: Logits float32 [n, vocab] in parts, and the commit behind them; an event, to be set when everything before it is
#: handed on; None: the end.
_Item = tuple[list[NDArray[np.float32]], Commit] | threading.Event | None


class Results(threading.Thread):
    """Stores each result before it hands in its commit, so that who hears of the end finds the result.

    A thread of its own: what takes long, a hundred megabytes or a payload Redis that does not answer, holds up neither
    the engine nor the commits of others.
    """

    def __init__(self, links: Links, committer: Committer) -> None:
        super().__init__(name="results", daemon=True)
        self._links, self._committer = links, committer
        self._queue: SimpleQueue[_Item] = SimpleQueue()

    def submit(self, logits: list[NDArray[np.float32]], commit: Commit) -> None:
        """`logits` is not changed any more."""
        self._queue.put((logits, commit))

    def store_kv(self, request: str, fields: Mapping[str, bytes]) -> None:
        """Store what `read_asked` found where the gateway looks for it, at once: what the last stage hands on must find
        it there. Raises Stopping when the process should end meanwhile."""
        key = self._links.keys.kv_asked(request)

        def store() -> None:
            reach("worker.before_result")
            names = list(fields)
            for start in range(0, len(names), PAGES_TOGETHER):
                together = self._links.payload.pipeline(transaction=True)  # no page without a time to live
                some = {name: fields[name] for name in names[start : start + PAGES_TOGETHER]}
                together.hset(key, mapping=cast(Any, some))
                together.expire(key, RESULT_S)
                together.execute()

        self._links.retry_until_reachable(store, "store KV")

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was submitted, here and to the committer, is answered. False after `timeout_s`."""
        until, handed_on = time.monotonic() + timeout_s, threading.Event()
        self._queue.put(handed_on)
        return handed_on.wait(timeout_s) and self._committer.flush(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End the thread once what was submitted is handed on."""
        self._queue.put(None)

    def run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            logits, commit = item
            try:
                self._store(commit.request, encode_result(np.concatenate(logits)))
            except Stopping:
                continue
            self._committer.submit([commit])
            del item, logits

    def _store(self, request: str, value: bytes) -> None:
        def store() -> None:
            reach("worker.before_result")
            self._links.payload.set(self._links.keys.result(request), value, ex=RESULT_S)
            reach("worker.after_result")

        self._links.retry_until_reachable(store, "store result")
