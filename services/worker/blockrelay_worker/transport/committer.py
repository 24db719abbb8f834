"""Commits tokens in a thread, so that the step does not wait: one COMMIT call in flight, the next carries the rest."""

import threading
import time
from collections import Counter

from blockrelay.observability.metrics.worker import WorkerMetrics
from blockrelay.protocol.messages import Commit
from blockrelay.protocol.transitions.calls import commit
from blockrelay_worker.transport.events import Event, Verdicts
from blockrelay_worker.transport.mailbox import Mailbox
from blockrelay_worker.transport.redis_links import Links, Stopping

#: What was submitted together; an event, to be set when everything before it is answered; None: the end.
_Item = list[Commit] | threading.Event | None


class Committer(threading.Thread):
    """Takes commits in order and delivers their verdicts to the mailbox in order. Survives a Redis restart.

    If the process should end before Redis answers, the commits that wait are given up and get no verdict.
    It works while the engine computes, which waits whenever this thread holds the interpreter: so it does little. Any
    thread may call `submit`, `flush` and `close`.
    """

    def __init__(self, links: Links, mailbox: Mailbox[Event], metrics: WorkerMetrics) -> None:
        super().__init__(name="committer", daemon=True)
        self._links, self._mailbox, self._metrics = links, mailbox, metrics
        self._scripts = links.scripts.for_one_thread()
        self._queue = Mailbox[_Item]()

    def submit(self, commits: list[Commit]) -> None:
        """Queues commits. Returns at once."""
        if commits:
            self._queue.put(commits)

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything submitted is answered, or given up because the process should end.

        Returns False if `timeout_s` seconds passed first. True does not prove that the tokens are committed: only a
        verdict does.
        """
        answered = threading.Event()
        self._queue.put(answered)
        return answered.wait(timeout_s)

    def close(self) -> None:
        """Ends the thread after everything submitted is answered or given up. Returns at once.

        Commits that are submitted afterwards may be lost, and `flush` may then wait its whole time.
        """
        self._queue.put(None)

    def run(self) -> None:
        while True:
            items = self._queue.take(None)
            batch = [one for item in items if isinstance(item, list) for one in item]
            if batch:
                self._commit(batch)
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            if None in items:
                self._scripts.give_back()
                return

    def _commit(self, batch: list[Commit]) -> None:
        """Calls COMMIT for a batch until Redis answers, and delivers the verdicts."""
        call, began = commit(batch), time.monotonic()
        try:
            answers = self._links.retry_until_reachable(lambda: self._scripts.run(call), "commit")
        except Stopping:
            return
        self._metrics.commit_seconds.observe(time.monotonic() - began)
        for verdict, count in Counter(answer.verdict for answer in answers).items():
            self._metrics.commits.labels(verdict).inc(count)
        self._mailbox.put(Verdicts(tuple(zip(batch, answers, strict=True))))
