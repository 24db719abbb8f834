"""The event that a stage moved from a device that failed to another one, in the terminal entry of a log."""

import math
from dataclasses import dataclass
from typing import Any

from blockrelay.errors import WireError
from blockrelay.protocol.encoding.checks import count, entries, flag, items, reading, text

#: Largest block number that is accepted: more than any model has.
MAX_BLOCKS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackEvent:
    """A stage whose device failed and that another device took over; RERUN and DEAD record it."""

    block_id: str  # the block that failed if the device named one, else the stage's first block
    source: str  # kind of the device that failed, GPU
    target: str  # kind of the device that took over, CPU
    reason: str  # as precise as the error allows, `gpu_memory_error` for example
    success: bool  # the target computed the stage: a COMMIT after the failure, or a good end, shows it
    blocks: tuple[str, ...]  # all blocks of the stage
    position: int | None = None  # committed tokens at the failure; None in the answer of RERUN
    rows_recomputed: int | None = None  # known tokens that the next run computed again; None before it did
    error_code: str | None = None  # one of `errors.ErrorCode`; None if the device named none
    predicted_slowdown: float | None = None  # seconds of the stage on the target for one on the source; None: unknown
    seen_slowdown: float | None = None  # the same as workers measured it, known at the end of the request

    @classmethod
    def decode(cls, value: object) -> "FallbackEvent":
        """Reads the parsed JSON of an event as scripts write it. Raises WireError for anything else.

        Keys that differ from the fields: `from`, `to`, `rows`, `predicted`, `seen`, and `blocks`, the numbers of the
        first and last block.
        """
        with reading("a fallback event"):
            m = entries(value)
            return cls(
                block_id=text(m["block_id"]),
                source=text(m["from"]),
                target=text(m["to"]),
                reason=text(m["reason"]),
                success=flag(m["success"]),
                position=count(m["position"]) if "position" in m else None,
                rows_recomputed=count(m["rows"]) if "rows" in m else None,
                blocks=_blocks(items(m["blocks"])),
                error_code=text(m["error_code"]) if "error_code" in m else None,
                predicted_slowdown=_slowdown(m.get("predicted")),
                seen_slowdown=_slowdown(m.get("seen")),
            )

    @property
    def cause(self) -> str:
        """The coarse reason that metrics use as label: `gpu_error` for all GPU errors, else `reason` itself."""
        return "gpu_error" if self.reason.startswith("gpu_") else self.reason

    def to_json(self) -> dict[str, str | bool | int | float | list[str] | None]:
        """Returns the event as it appears in answers to clients; a slowdown that is not known is left out."""
        moved = {"block_id": self.block_id, "blocks": list(self.blocks), "from": self.source, "to": self.target}
        why = {"reason": self.reason, "error_code": self.error_code, "success": self.success}
        slowdowns = {"predicted_slowdown": self.predicted_slowdown, "seen_slowdown": self.seen_slowdown}
        known = {name: value for name, value in slowdowns.items() if value is not None}
        return {**moved, **why, "position": self.position, "rows_recomputed": self.rows_recomputed, **known}


def _slowdown(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise WireError(f"{value!r:.40} is no slowdown")
    return float(value)


def _blocks(ends: list[Any]) -> tuple[str, ...]:
    first, last = (count(number, MAX_BLOCKS) for number in ends)
    return tuple(f"block_{number}" for number in range(first, last + 1))
