"""Somebody who looks after lost GPUs: they are tried again at once, in quarantine or not."""

from contextlib import suppress
from dataclasses import dataclass

from blockrelay.errors import RedisTrouble
from blockrelay.protocol.keys import Keys
from blockrelay.redis.errors import CommandError
from blockrelay.redis.registry import read_lost_devices, retry_lost_device
from blockrelay_launcher.drill.parts.part import DrillPart
from blockrelay_launcher.drill.system import DrilledSystem

#: Seconds between two looks.
LOOK_S = 0.5


@dataclass(slots=True)
class DeviceRetries(DrillPart):
    """A drill loses a device so often that it would hardly ever be there to be lost."""

    system: DrilledSystem

    def _run(self) -> None:
        keys = Keys(self.system.running.cell)
        while not self._over.wait(LOOK_S):
            with suppress(RedisTrouble, CommandError), self.system.administrator("redis-control") as client:
                for lost in read_lost_devices(client, keys):
                    retry_lost_device(client, keys, lost)
