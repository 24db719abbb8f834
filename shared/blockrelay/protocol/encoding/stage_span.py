"""The record of one step of a stage for a request that asked for a trace.

Workers write spans to `Keys.trace` after their steps, and lose those that they cannot write. Gateways build traces from
them; nothing else depends on them.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from dataclasses import fields as fields_of
from typing import Literal, get_args

from blockrelay.errors import WireError
from blockrelay.protocol.encoding import codec
from blockrelay.protocol.encoding.checks import MAX_COUNT, count, reading, text

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
        """When the step began, in Unix microseconds of the control Redis' clock."""
        return self.ready_us + self.waited_us

    @property
    def ended_us(self) -> int:
        """When the step ended, in Unix microseconds of the control Redis' clock."""
        return self.began_us + self.computed_us

    @property
    def blocks(self) -> str:
        """The blocks of the stage as text, `1-3`."""
        return f"{self.first}-{self.last}"

    def encode(self) -> dict[str, bytes]:
        """Returns the fields of a stream entry."""
        return {"span": codec.pack_for_script(list(astuple(self)))}

    @classmethod
    def decode(cls, fields: Mapping[bytes, bytes]) -> "StageSpan":
        """Reads the fields of a stream entry. Raises WireError."""
        with reading("a span of a stage"):
            names = [field.name for field in fields_of(cls)]
            values = dict(zip(names, codec.unpack_list(fields[b"span"]), strict=True))
            text(values["worker_id"])
            if values["kind"] not in get_args(Kind):
                raise WireError(f"a step of a stage is no {values['kind']!r:.40}")
            for name in values.keys() - {"worker_id", "kind"}:
                count(values[name], _MAX_US if name == "ready_us" else MAX_COUNT)
            return cls(**values)


#: Largest time that is accepted: the year 2255, and exact in a float.
_MAX_US = 2**53
