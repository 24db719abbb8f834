"""What a device tells of itself with its answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Figures:
    """Of one stage and the device that it is on, in bytes. Those of memory are at most a second old.

    `up_bytes` and `down_bytes` went to the device and came from it since the stage was loaded; so many steps were
    repeated of recorded ones, and so often recording was given up. `retries` counts tries to make a stage or to do a
    step behind the first. `sessions` of ONNX blocks as `WarmCounts` has them;
    `grown`: their memory does not come back. What nobody tells is 0: `memory_bytes` of most providers.
    """

    weight_bytes: int = 0
    pool_bytes: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    process_bytes: int = 0
    memory_bytes: int = 0
    memory_used_bytes: int = 0
    repeated_steps: int = 0
    recording_failures: int = 0
    retries: int = 0
    sessions: Mapping[str, float] = field(default_factory=dict[str, float])
    grown: bool = False

    @property
    def counted(self) -> dict[str, float]:
        """All that only grows, by the names of `DeviceMetrics.counters`."""
        return {
            "up_bytes": self.up_bytes,
            "down_bytes": self.down_bytes,
            "repeated_steps": self.repeated_steps,
            "recording_failures": self.recording_failures,
            "retries": self.retries,
            **self.sessions,
        }

    def hear(self, told: Mapping[str, Any]) -> None:
        """Fields of an answer: what went over the bus, and was tried again, since the last one, and whatever else is
        there."""
        self.up_bytes += told.get("up_bytes", 0)
        self.down_bytes += told.get("down_bytes", 0)
        self.retries += told.get("retries", 0)
        for name in told.keys() - {"up_bytes", "down_bytes", "retries"}:
            setattr(self, name, told[name])
