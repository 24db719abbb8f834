"""Somebody who looks after lost GPUs: what is in quarantine is tried again."""

from contextlib import suppress
from dataclasses import dataclass

from blockrelay.errors import RedisTrouble
from blockrelay.protocol.keys import Keys
from blockrelay.redis.errors import CommandError
from blockrelay.redis.registry import read_lost_devices, retry_lost_device
from blockrelay_launcher.drill.parts.part import DrillPart
from blockrelay_launcher.drill.system import DrilledSystem

#: Seconds between two looks.
LOOK_S = 2.0


@dataclass(slots=True)
class DeviceRetries(DrillPart):
    """A drill loses a device far more often than quarantine allows, which would leave nothing of it to lose."""

    system: DrilledSystem

    def _run(self) -> None:
        keys = Keys(self.system.running.cell)
        while not self._over.wait(LOOK_S):
            with suppress(RedisTrouble, CommandError), self.system.administrator("redis-control") as client:
                for lost in read_lost_devices(client, keys):
                    if lost.quarantine:
                        retry_lost_device(client, keys, lost)
