"""Waits until a GPU that was lost may be tried again, and publishes the wait in Redis."""

import threading
from contextlib import suppress

from blockrelay.errors import RedisTrouble
from blockrelay.observability.logs import get
from blockrelay.observability.metrics.devices import DeviceMetrics
from blockrelay.redis.registry import LostDevice, forget_lost_device, tell_lost_device
from blockrelay_worker.execution.process.executors import DeviceExecutors
from blockrelay_worker.policy import DEVICE_WAIT_POLL_S
from blockrelay_worker.transport.redis_links import Links


def wait_for_device(
    executors: DeviceExecutors, links: Links, metrics: DeviceMetrics, stop: threading.Event, *, worker_id: str
) -> bool:
    """Waits until the device may be tried again: its time has passed, or an operator ran `blockrelay devices retry`.

    Returns False when this process should end or drain first. Meanwhile `blockrelay devices` lists the device under
    the name `worker_id`.
    """
    lost = _lost(executors, worker_id)
    if lost is None:
        return True
    get().warning(
        "DEVICE_WAITS",
        device=lost.device,
        reason=lost.reason,
        quarantine=lost.quarantine,
        seconds=round(lost.wait_s, 1),
    )
    if lost.quarantine:
        metrics.quarantines.inc()
        metrics.quarantined.set(1)
    first = lost
    while lost is not None:
        try:
            if tell_lost_device(links.control, links.keys, lost):
                get().info("DEVICE_RETRIED", device=lost.device)
                executors.forget_losses()
                break
        except RedisTrouble as error:
            links.watch.count_error(error)  # the wait goes on unpublished
        if stop.wait(min(lost.wait_s, DEVICE_WAIT_POLL_S)) or links.drain.is_requested:
            break
        lost = _lost(executors, worker_id)
    metrics.quarantined.set(0)
    with suppress(RedisTrouble):  # readers ignore an entry that is no longer renewed
        forget_lost_device(links.control, links.keys, first)
    return not (stop.is_set() or links.drain.is_requested)


def _lost(executors: DeviceExecutors, worker_id: str) -> LostDevice | None:
    """Returns the record of the lost device, or None when it may be tried."""
    wait_s = executors.usable_in_s()
    if wait_s <= 0:
        return None
    return LostDevice(
        device=executors.name,
        worker=worker_id,
        reason=executors.last_loss,
        losses=executors.losses,
        quarantine=executors.in_quarantine,
        wait_s=wait_s,
    )
