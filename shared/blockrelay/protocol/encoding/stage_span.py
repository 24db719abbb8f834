"""What a stage did for one request in one step: worker → `Keys.trace`, for requests that ask for it. Never truth.

Workers write them behind their steps and lose what they cannot write; gateways make traces of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from blockrelay.errors import WireError
from blockrelay.protocol.encoding import codec
from blockrelay.protocol.encoding.checks import count, reading, text

Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """One step of `worker`, which runs stage `stage` (from 0) with the blocks `first` to `last`.

    `run` counts the runs of the request, `number` the steps that this worker has taken in this run: from 1 and from 0.
    What is not there was lost. `rows` of the request from `position` on were computed among `batch_rows`. They could be
    computed here from `ready_us` on (Unix microseconds of the control Redis' clock), waited `waited_us` and were
    computed for `computed_us`.
    """

    run: int
    worker: str
    stage: int
    first: int
    last: int
    number: int
    kind: Kind
    position: int
    rows: int
    batch_rows: int
    ready_us: int
    waited_us: int
    computed_us: int

    @property
    def began_us(self) -> int:
        return self.ready_us + self.waited_us

    @property
    def ended_us(self) -> int:
        return self.began_us + self.computed_us

    @property
    def blocks(self) -> str:
        """As people write them."""
        return f"{self.first}-{self.last}"

    def encode(self) -> dict[str, bytes]:
        """The fields of a stream entry."""
        where = [self.run, self.worker, self.stage, self.first, self.last, self.number]
        what = [self.kind, self.position, self.rows, self.batch_rows]
        return {"span": codec.pack_list([*where, *what, self.ready_us, self.waited_us, self.computed_us])}

    @classmethod
    def decode(cls, fields: Mapping[bytes, bytes]) -> "StageSpan":
        """Raises WireError."""
        with reading("a span of a stage"):
            run, worker, stage, first, last, number, kind, *counts = codec.unpack_list(fields[b"span"])
            if kind not in get_args(Kind):
                raise WireError(f"a step of a stage is no {kind!r:.40}")
            position, rows, batch_rows, ready, waited, computed = counts
            return cls(
                run=count(run),
                worker=text(worker),
                stage=count(stage),
                first=count(first),
                last=count(last),
                number=count(number),
                kind=kind,
                position=count(position),
                rows=count(rows),
                batch_rows=count(batch_rows),
                ready_us=count(ready, _MOST_US),
                waited_us=count(waited),
                computed_us=count(computed),
            )


#: Of a time: the year 2255, and what a float holds without rounding.
_MOST_US = 2**53
