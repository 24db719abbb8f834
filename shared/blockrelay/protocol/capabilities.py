"""What an executor can do and how fast it is, as its worker says it and others read it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from blockrelay.errors import WireError
from blockrelay.protocol.encoding import checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Of one stage on one worker.

    `exact`: a row's bits do not depend on the batch that it is in. `ragged`: the segments of a batch may have different
    numbers of rows; otherwise all have the same. `max_rows` and `max_sequences` of one batch. `kv_tokens` tokens have
    room in its KV pages.
    """

    exact: bool
    ragged: bool
    max_rows: int
    max_sequences: int
    precision: str
    numerics_id: str
    kv_tokens: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, data: bytes | None) -> "Capabilities | None":
        """None for a worker that is gone or has not said them yet, and for what cannot be read.

        What a newer worker says beside these is passed over.
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
    """How fast a worker says it is.

    `row_s` for a prompt row; `steps`: seconds between two tokens of a request by the number of requests at once, not
    empty; `recent_concurrency`: the most at once of late, which a newcomer must expect beside it.
    """

    row_s: float
    steps: Mapping[int, float]
    recent_concurrency: int = 1

    @property
    def token_s(self) -> float:
        """Seconds for a token, with as many requests at once as it was ever measured with."""
        most = max(self.steps)
        return self.steps[most] / most

    def to_script(self) -> dict[str, Any]:
        """As BEAT reads it, in microseconds."""
        steps = " ".join(f"{batch}:{max(1, int(seconds * 1e6))}" for batch, seconds in sorted(self.steps.items()))
        return {
            "row_us": max(1, int(self.row_s * 1e6)),
            "step_us": steps,
            "recent_concurrency": self.recent_concurrency,
        }

    @classmethod
    def from_redis(cls, fields: Mapping[bytes, bytes]) -> "Pace | None":
        """From a worker's record; None while it has not measured itself."""
        if b"row_us" not in fields:
            return None
        pairs = (pair.split(b":") for pair in fields[b"step_us"].split())
        steps = {int(batch): int(us) / 1e6 for batch, us in pairs}
        return cls(int(fields[b"row_us"]) / 1e6, steps, int(fields[b"recent_concurrency"]))
