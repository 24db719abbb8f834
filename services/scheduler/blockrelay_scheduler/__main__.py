"""`python -m blockrelay_scheduler`: settings from the environment, SIGTERM or SIGINT end it."""

import signal
import sys
import threading

from prometheus_client import CollectorRegistry

from blockrelay import failpoints, logs
from blockrelay.block_folder import open_block_folder
from blockrelay.errors import BlockFolderError, BlockrelayError, UsageError
from blockrelay.keys import Keys
from blockrelay.metrics import SchedulerMetrics
from blockrelay.plan import uniform_split
from blockrelay.redis_link import Scripts, connect
from blockrelay.settings import SchedulerSettings, read_settings
from blockrelay.status_server import StatusServer
from blockrelay_scheduler.loop import Link, Scheduler


def serve(settings: SchedulerSettings, stop: threading.Event) -> None:
    """Schedule until `stop`. Raises UsageError or BlockFolderError at the start, for what no waiting mends."""
    manifest = open_block_folder(settings.model, blocks=[]).manifest
    blocks = manifest.model.blocks
    uniform_split(blocks, settings.stages)
    keys = Keys(settings.cell)
    client = connect(settings.redis_url)
    payload = connect(settings.payload_redis_url) if settings.payload_redis_url else client
    link = Link(client, payload, keys, Scripts(client, keys, retention_s=settings.retention_s))
    metrics = SchedulerMetrics(CollectorRegistry())
    scheduler = Scheduler(settings=settings, link=link, metrics=metrics, model=manifest.model_hash[:16], blocks=blocks)
    try:
        status = StatusServer(settings.host, settings.port, metrics.registry, scheduler.gaps)
    except OSError as error:
        raise UsageError(f"port {settings.port} on {settings.host} cannot be used: {error.strerror}") from error
    logs.get().info("NODE_READY", role="scheduler", port=status.port, model=manifest.model.name, blocks=blocks)
    try:
        scheduler.run(stop)
    finally:
        status.close()
        client.close()
        payload.close()
        logs.get().info("NODE_STOPPED", role="scheduler")


def main() -> int:
    """The exit code: 0 after a signal, 2 for unusable settings, model or Redis, 70 for what a restart may mend."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        settings = read_settings(SchedulerSettings, sys.argv[1:], program="python -m blockrelay_scheduler")
        logs.configure(settings.log_level, node_id=settings.node_id or logs.node_name("scheduler"))
        failpoints.arm("scheduler", settings.failpoint)
        serve(settings, stop)
    except BlockrelayError as error:
        sys.stderr.write(f"scheduler: {error}\n")
        return 2 if isinstance(error, UsageError | BlockFolderError) else 70
    return 0


if __name__ == "__main__":
    sys.exit(main())
