"""`python -m blockrelay_worker [--device cpu|gpu] ...`: one worker process (options: see blockrelay.settings)."""

import signal
import sys
import threading

from blockrelay import failpoints
from blockrelay.errors import BlockrelayError, UsageError
from blockrelay.exit_codes import BROKEN, UNUSABLE, end_with_any_thread, exit_code
from blockrelay.observability import logs
from blockrelay.settings import WorkerSettings, read_settings
from blockrelay_worker.lifecycle.worker import Worker
from blockrelay_worker.transport.redis_links import Drain


def main() -> int:
    """Exit code 0 after a drain, 2 for settings, a model or a Redis with which no start will ever succeed, 70 for a
    failure that another start may not meet.

    The first signal lets a worker that serves finish what ends in `drain_s`; the second ends it at once.
    """
    try:
        settings = read_settings(WorkerSettings, sys.argv[1:], program="python -m blockrelay_worker")
    except UsageError as error:
        sys.stderr.write(f"worker: {error}\n")
        return UNUSABLE
    logs.configure(settings.log_level, node_id=settings.node_id or logs.node_name(settings.device))
    failpoints.arm("worker", settings.failpoint)
    end_with_any_thread()
    stop, drain = threading.Event(), Drain()

    def end(*_: object) -> None:
        if drain.possible and not drain.asked and settings.drain_s > 0:
            drain.asked = True
            timer = threading.Timer(settings.drain_s, stop.set)  # also where the engine waits for Redis
            timer.daemon = True
            timer.start()
        else:
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    worker: Worker | None = None
    try:
        worker = Worker(settings, stop, drain)
        worker.run()
    except BlockrelayError as error:
        sys.stderr.write(f"worker: {error}\n")
        served = worker is not None and worker.has_served
        return BROKEN if served else exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
