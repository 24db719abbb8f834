"""Starts a worker process: `python -m blockrelay_worker [--device cpu|gpu] ...` (options: see blockrelay.settings)."""

import signal
import sys

from blockrelay import failpoints
from blockrelay.errors import UsageError
from blockrelay.exit_codes import UNUSABLE, complain, end_with_any_thread
from blockrelay.observability import logs
from blockrelay.settings import WorkerSettings, read_settings
from blockrelay_worker.lifecycle.workers import Workers


def main() -> int:
    """Runs the workers until they end; returns the exit code.

    0 after a signal, 2 for settings, a model or a Redis with which no start can succeed, 70 for a failure that another
    start may not meet. After the first SIGTERM or SIGINT, workers that serve finish the requests that end within
    `drain_s` seconds; others end at once. The second signal ends all at once. Call it in the main thread. A signal
    while the device is being opened raises SystemExit(0).
    """
    try:
        settings = read_settings(WorkerSettings, sys.argv[1:], program="python -m blockrelay_worker")
    except UsageError as error:
        complain(error)
        return UNUSABLE
    logs.configure(settings.log_level, node_id=settings.node_id or logs.node_name(settings.device))
    failpoints.arm("worker", settings.failpoint)
    end_with_any_thread()
    workers = Workers(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: workers.end())
    return workers.run()


if __name__ == "__main__":
    sys.exit(main())
