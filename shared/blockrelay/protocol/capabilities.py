"""An executor's limits and measured speed, as its worker publishes them in Redis."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from blockrelay.errors import WireError
from blockrelay.protocol.encoding import checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Limits and numerics of one stage on one worker."""

    exact: bool  # the bits of a token do not depend on the batch that it is in
    ragged: bool  # the segments of a batch may differ in length; otherwise all have the same
    max_rows: int  # tokens of one batch
    max_sequences: int  # segments of one batch
    precision: str
    numerics_id: str
    kv_tokens: int  # tokens that its KV pages hold

    def to_json(self) -> str:
        """Returns the capabilities as the JSON in a worker's record; `from_json` is the inverse."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, data: bytes | None) -> "Capabilities | None":
        """Reads the capabilities in a worker's record; None if there are none or they cannot be read.

        Unknown fields, which a newer worker may write, are ignored.
        """
        if data is None:
            return None
        try:
            with checks.reading("capabilities"):
                content = checks.entries(json.loads(data))
                return cls(
                    exact=checks.flag(content["exact"]),
                    ragged=checks.flag(content["ragged"]),
                    max_rows=max(1, checks.count(content["max_rows"])),
                    max_sequences=max(1, checks.count(content["max_sequences"])),
                    precision=checks.text(content["precision"]),
                    numerics_id=checks.text(content["numerics_id"]),
                    kv_tokens=checks.count(content["kv_tokens"]),
                )
        except WireError:
            return None


@dataclass(frozen=True, slots=True)
class Pace:
    """A worker's speed, as it measured it itself."""

    row_s: float  # seconds per prompt token
    steps: Mapping[int, float]  # seconds between two tokens of a request, by the number of requests at once; not empty
    recent_concurrency: int = 1  # the most requests at once of late; a new request must expect as many beside it

    @property
    def token_s(self) -> float:
        """Seconds per token that all requests together generate (1 / throughput), at the highest concurrency."""
        largest = max(self.steps)
        return self.steps[largest] / largest

    def to_script(self) -> dict[str, Any]:
        """Returns the argument `pace` of the heartbeat script BEAT, its times in whole microseconds of at least 1."""
        steps = " ".join(f"{batch}:{max(1, int(seconds * 1e6))}" for batch, seconds in sorted(self.steps.items()))
        return {
            "row_us": max(1, int(self.row_s * 1e6)),
            "step_us": steps,
            "recent_concurrency": self.recent_concurrency,
        }

    @classmethod
    def from_redis(cls, fields: Mapping[bytes, bytes]) -> "Pace | None":
        """Reads the pace in a worker's record; None while the worker has not measured itself.

        Raises KeyError if another field of the pace is missing, and ValueError if one is malformed.
        """
        if b"row_us" not in fields:
            return None
        pairs = (pair.split(b":") for pair in fields[b"step_us"].split())
        steps = {int(batch): int(us) / 1e6 for batch, us in pairs}
        return cls(int(fields[b"row_us"]) / 1e6, steps, int(fields[b"recent_concurrency"]))
