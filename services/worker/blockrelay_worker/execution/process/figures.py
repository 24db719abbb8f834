"""The figures that a device's process sends with its answers: memory, bytes over the bus, counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Figures:
    """Figures of one stage and the device that it is on, as of the stage's last step. Memory is in bytes, and may be
    older than the step by a second or more; 0 where the provider does not say."""

    weight_bytes: int = 0
    """Bytes of the stage's weights on the device; with ONNX blocks of other makers those of warm blocks."""
    pool_bytes: int = 0
    """Bytes of the stage's KV pages."""
    up_bytes: int = 0
    """Bytes that went to the device since the stage was loaded."""
    down_bytes: int = 0
    """Bytes that came from the device since the stage was loaded."""
    process_bytes: int = 0
    """Resident memory of the device's process on the host."""
    memory_bytes: int = 0
    """Memory of the device; 0 with most providers."""
    memory_used_bytes: int = 0
    """Memory of the device in use, also by other processes."""
    repeated_steps: int = 0
    """Steps that replayed a recorded graph."""
    recording_failures: int = 0
    """How often recording was given up."""
    retries: int = 0
    """Tries to make a stage or run a step, after the first of each."""
    sessions: Mapping[str, float] = field(default_factory=dict[str, float])
    """Counts of ONNX-block sessions, by the fields of `WarmCounts`."""
    grown: bool = False
    """True if the memory of closed sessions does not come back."""

    @property
    def counted(self) -> dict[str, float]:
        """All figures that only grow, by the names in `DeviceMetrics.counters`."""
        return {
            "up_bytes": self.up_bytes,
            "down_bytes": self.down_bytes,
            "repeated_steps": self.repeated_steps,
            "recording_failures": self.recording_failures,
            "retries": self.retries,
            **self.sessions,
        }

    def hear(self, fields: Mapping[str, Any]) -> None:
        """Takes over the `figures` of an answer, whose keys are names of fields here. Adds up bytes over the bus and
        retries, and replaces all others."""
        self.up_bytes += fields.get("up_bytes", 0)
        self.down_bytes += fields.get("down_bytes", 0)
        self.retries += fields.get("retries", 0)
        for name in fields.keys() - {"up_bytes", "down_bytes", "retries"}:
            setattr(self, name, fields[name])
