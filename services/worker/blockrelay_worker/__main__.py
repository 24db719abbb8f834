"""`python -m blockrelay_worker`: one worker process, configured by BLOCKRELAY_* (see blockrelay.settings)."""

import signal
import sys
import threading

from pydantic import ValidationError

from blockrelay import logs
from blockrelay.errors import BlockrelayError
from blockrelay.settings import WorkerSettings
from blockrelay_worker.service import Worker


def main() -> int:
    """Exit code 0 after a drain, 2 for settings or a model that cannot be served."""
    try:
        settings = WorkerSettings()
    except ValidationError as error:
        sys.stderr.write(f"worker settings: {error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}\n")
        return 2
    logs.configure(settings.log_level, node_id=settings.node_id or logs.node_name(settings.device))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        Worker(settings, stop).run()
    except BlockrelayError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
