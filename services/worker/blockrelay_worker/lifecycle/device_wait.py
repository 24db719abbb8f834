"""Between two processes of a GPU that was lost: its worker waits, says so, and hears who wants it tried at once."""

import threading
from contextlib import suppress

from blockrelay.errors import RedisTrouble
from blockrelay.observability.logs import get
from blockrelay.observability.metrics.devices import DeviceMetrics
from blockrelay.redis.registry import LostDevice, forget_lost_device, tell_lost_device
from blockrelay_worker.execution.process.executors import DeviceExecutors
from blockrelay_worker.transport.redis_links import Links

#: How often the worker looks whether it should try its device or end. Seconds.
LOOK_S = 1.0


def wait_for_device(
    executors: DeviceExecutors, links: Links, metrics: DeviceMetrics, stop: threading.Event, *, worker: str
) -> bool:
    """Until the device may be tried again, by its time or since somebody asked (`blockrelay devices retry`). False when
    this process should end first. `worker` is the name under which it says that it waits."""
    lost = _lost(executors, worker)
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
            links.watch.met(error)  # nobody is told, and it waits all the same
        if stop.wait(min(lost.wait_s, LOOK_S)) or links.drain.asked:
            break
        lost = _lost(executors, worker)
    metrics.quarantined.set(0)
    with suppress(RedisTrouble):  # what nobody tells again is forgotten
        forget_lost_device(links.control, links.keys, first)
    return not (stop.is_set() or links.drain.asked)


def _lost(executors: DeviceExecutors, worker: str) -> LostDevice | None:
    """None when the device may be tried."""
    wait_s = executors.usable_in_s()
    if wait_s <= 0:
        return None
    return LostDevice(
        device=executors.name,
        worker=worker,
        reason=executors.last_loss,
        losses=executors.losses,
        quarantine=executors.in_quarantine,
        wait_s=wait_s,
    )
