"""Retries lost GPUs at once, in quarantine or not, as an operator would."""

from contextlib import suppress
from dataclasses import dataclass

from blockrelay.errors import RedisTrouble
from blockrelay.protocol.keys import Keys
from blockrelay.redis.errors import CommandError
from blockrelay.redis.registry import read_lost_devices, retry_lost_device
from blockrelay_launcher.drill.parts.part import DrillPart
from blockrelay_launcher.drill.system import DrilledSystem

#: Seconds between two checks for lost devices.
LOOK_S = 0.5


@dataclass(slots=True)
class DeviceRetries(DrillPart):
    """The part that retries lost GPUs: without it, a drill kills GPUs so often that they would seldom serve."""

    system: DrilledSystem

    def _run(self) -> None:
        keys = Keys(self.system.running.cell)
        while not self._over.wait(LOOK_S):
            with suppress(RedisTrouble, CommandError), self.system.administrator("redis-control") as client:
                for lost in read_lost_devices(client, keys):
                    retry_lost_device(client, keys, lost)
