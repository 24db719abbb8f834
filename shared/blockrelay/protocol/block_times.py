"""The times that a worker measured for the blocks of its stage, as it publishes them in its record."""

import json
from dataclasses import asdict, dataclass

from blockrelay.errors import WireError
from blockrelay.protocol.encoding import checks

#: Share of the free memory of a machine that stages may take, KV pages included, which its workers load beside their
#: present ones.
BESIDE_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """The mean seconds of each block in the decode steps of the last seconds."""

    first: int
    """The first block, from 1."""
    seconds: tuple[float, ...]
    """Seconds of a step of each block, the first one first."""
    rows: float
    """Mean number of tokens in a step, at least 1."""
    context: float
    """Mean number of tokens that each of them attends to."""
    free_bytes: int
    """Memory that the worker's process could still take."""

    def to_json(self) -> str:
        """Returns the JSON in a worker's record, its times in microseconds; `from_json` is the inverse."""
        times = [round(second * 1e6) for second in self.seconds]
        rounded = {"rows": round(self.rows, 2), "context": round(self.context)}
        return json.dumps({**asdict(self), "seconds": times, **rounded}, separators=(",", ":"))

    @classmethod
    def from_json(cls, data: bytes | None) -> "BlockTimes | None":
        """Reads the times in a worker's record; None if there are none or they cannot be read."""
        if data is None:
            return None
        try:
            with checks.reading("block times"):
                content = checks.entries(json.loads(data))
                return cls(
                    first=max(1, checks.count(content["first"])),
                    seconds=tuple(checks.count(one) / 1e6 for one in checks.items(content["seconds"])),
                    rows=min(max(1.0, float(content["rows"])), 1e6),
                    context=min(max(0.0, float(content["context"])), 1e9),
                    free_bytes=checks.count(content["free_bytes"]),
                )
        except WireError:
            return None
