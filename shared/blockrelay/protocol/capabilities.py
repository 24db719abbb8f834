"""What an executor can do, as its worker registers it and others read it."""

import json
from dataclasses import asdict, dataclass

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
        """None for a worker that says nothing of them, as older ones do, and for what cannot be read.

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
