"""A block that moved from a device that failed to another one, as the terminal entry of a log tells it."""

from dataclasses import dataclass

from blockrelay.protocol.encoding.checks import count, entries, flag, reading, text


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackEvent:
    """RERUN, DEAD → terminal entry. A block whose device (`source`) failed and that went to another one (`target`).

    `success`: that one has computed it, which a COMMIT behind the failure shows. `position`: how many tokens there were
    when it failed. `rows_recomputed`: rows of known tokens (prompt and those) that the run behind it computed again,
    since their KV pages were not at hand. Both are None where an older release has written the event.
    """

    block_id: str
    source: str
    target: str
    reason: str
    success: bool
    position: int | None = None
    rows_recomputed: int | None = None

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
            )

    def to_json(self) -> dict[str, str | bool | int | None]:
        """As answers carry it."""
        moved = {"block_id": self.block_id, "from": self.source, "to": self.target}
        where = {"position": self.position, "rows_recomputed": self.rows_recomputed}
        return {**moved, "reason": self.reason, "success": self.success, **where}
