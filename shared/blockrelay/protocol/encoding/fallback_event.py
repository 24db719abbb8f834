"""Blocks that moved from a device that failed to another one, as the terminal entry of a log tells it."""

from dataclasses import dataclass
from typing import Any

from blockrelay.protocol.encoding.checks import count, entries, flag, items, reading, text

#: More than any model has: what claims to be a stage of more is none.
MAX_BLOCKS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackEvent:
    """RERUN, DEAD → terminal entry. A stage whose device (`source`) failed and that went to another one (`target`).

    `block_id` is the block that failed, where the device names one, else the first of the stage's `blocks`.
    `reason` is as fine as the error tells it (`gpu_memory_error`, ...), `error_code` one of `errors.ErrorCode`.
    `success`: the target has computed it, which a COMMIT behind the failure shows. `position`: how many tokens there
    were when it failed. `rows_recomputed`: rows of known tokens (prompt and those) that the run behind it computed
    again, since their KV pages were not at hand; None until a run has come behind it. `position` is None in the
    answers of RERUN and DEAD, `error_code` where the device said none.
    """

    block_id: str
    source: str
    target: str
    reason: str
    success: bool
    blocks: tuple[str, ...]
    position: int | None = None
    rows_recomputed: int | None = None
    error_code: str | None = None

    @classmethod
    def decode(cls, value: object) -> "FallbackEvent":
        """From the JSON of a terminal entry."""
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
            )

    @property
    def cause(self) -> str:
        """The coarse reason by which metrics count: `gpu_error` whatever a GPU did, or `worker_death`."""
        return "gpu_error" if self.reason.startswith("gpu_") else self.reason

    def to_json(self) -> dict[str, str | bool | int | list[str] | None]:
        """As answers carry it."""
        moved = {"block_id": self.block_id, "blocks": list(self.blocks), "from": self.source, "to": self.target}
        why = {"reason": self.reason, "error_code": self.error_code, "success": self.success}
        return {**moved, **why, "position": self.position, "rows_recomputed": self.rows_recomputed}


def _blocks(ends: list[Any]) -> tuple[str, ...]:
    first, last = (count(number, MAX_BLOCKS) for number in ends)
    return tuple(f"block_{number}" for number in range(first, last + 1))
