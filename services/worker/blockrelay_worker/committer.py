"""COMMIT behind the step: at most one call in flight; the next one carries everything since."""

import threading

from blockrelay.messages import Commit
from blockrelay.metrics import WorkerMetrics
from blockrelay.scripts import commit
from blockrelay_worker.links import Links, Stopping
from blockrelay_worker.mailbox import Mailbox, Verdicts


class Committer(threading.Thread):
    """Takes commits in order, delivers their verdicts to the mailbox in order. Survives a Redis restart."""

    def __init__(self, links: Links, mailbox: Mailbox, metrics: WorkerMetrics) -> None:
        super().__init__(name="committer", daemon=True)
        self._links, self._mailbox, self._metrics = links, mailbox, metrics
        self._pending: list[Commit] = []
        self._changed = threading.Condition()
        self._closed = False
        self._busy = False

    def submit(self, commits: list[Commit]) -> None:
        if not commits:
            return
        with self._changed:
            self._pending += commits
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything submitted is answered. False when `timeout_s` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending and not self._busy, timeout_s)

    def close(self) -> None:
        """End the thread once what is in flight is answered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                if not self._pending:
                    return
                batch, self._pending, self._busy = self._pending, [], True
            try:
                answers = self._links.insist(commit(batch))
            except Stopping:
                answers = []
            for answer in answers:
                self._metrics.commits.labels(answer.verdict).inc()
            if answers:
                self._mailbox.put(Verdicts(tuple(zip(batch, answers, strict=True))))
            with self._changed:
                self._busy = False
                self._changed.notify_all()
