"""The record of one step of a stage for a request that asked for a trace.

Workers write spans to `Keys.trace` after their steps, and lose those that they cannot write. Gateways build traces from
them; nothing else depends on them.
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
    """One step of one worker for one request."""

    run: int  # number of the run of the request, from 1
    worker_id: str
    stage: int  # from 0
    first: int  # first and last block of the stage
    last: int
    number: int  # of the step, among this worker's steps in this run, from 0; a gap means lost spans
    kind: Kind
    position: int  # of the request's first token in the step
    rows: int  # tokens of the request in the step
    batch_rows: int  # tokens of the whole batch
    ready_us: int  # when its input was there: Unix microseconds of the control Redis' clock
    waited_us: int  # from then until the step began
    computed_us: int  # time of the step

    @property
    def began_us(self) -> int:
        return self.ready_us + self.waited_us

    @property
    def ended_us(self) -> int:
        return self.began_us + self.computed_us

    @property
    def blocks(self) -> str:
        """The blocks of the stage as text, `1-3`."""
        return f"{self.first}-{self.last}"

    def encode(self) -> dict[str, bytes]:
        """Returns the fields of a stream entry."""
        where = [self.run, self.worker_id, self.stage, self.first, self.last, self.number]
        what = [self.kind, self.position, self.rows, self.batch_rows]
        return {"span": codec.pack_list([*where, *what, self.ready_us, self.waited_us, self.computed_us])}

    @classmethod
    def decode(cls, fields: Mapping[bytes, bytes]) -> "StageSpan":
        """Reads the fields of a stream entry. Raises WireError."""
        with reading("a span of a stage"):
            run, worker, stage, first, last, number, kind, *counts = codec.unpack_list(fields[b"span"])
            if kind not in get_args(Kind):
                raise WireError(f"a step of a stage is no {kind!r:.40}")
            position, rows, batch_rows, ready, waited, computed = counts
            return cls(
                run=count(run),
                worker_id=text(worker),
                stage=count(stage),
                first=count(first),
                last=count(last),
                number=count(number),
                kind=kind,
                position=count(position),
                rows=count(rows),
                batch_rows=count(batch_rows),
                ready_us=count(ready, _MAX_US),
                waited_us=count(waited),
                computed_us=count(computed),
            )


#: Largest time that is accepted: the year 2255, and exact in a float.
_MAX_US = 2**53
