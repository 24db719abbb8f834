"""The cost of a step by its rows, measured; and from it how many rows a step may have and how long it may last. Pure.

Beside decode rows, prompt rows fill a step up to a target time: without that bound a running request would wait for a
whole chunk of another prompt between two tokens. Prompt rows alone fill a step that stays far below the step limit, on
a slow CPU too. Drafts are added while a row costs clearly less than a token is worth: rows are nearly free if a step
waits for memory (weights), and not if it waits for arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from blockrelay_worker.policy import STUCK_FACTOR
from blockrelay_worker.scheduling.smoothing import smoothed

#: Prompt rows of a step before anything was measured; the minimum, so that a prompt always gets on; and their multiple.
FIRST_ROWS, LEAST_ROWS, GRAIN = 64, 32, 16
#: Decode step sizes (rows) that are timed separately. Drafts fill a step up to the last one at most.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
#: Share of right drafts at which a draft must already pay.
RIGHT_SHARE = 0.5
#: Decode steps after which all sizes are measured again: one odd measurement must not rule out a size for ever.
MEMORY_STEPS = 1000
#: First measurements of prompt rows, of which the least counts: these steps also read weights from the disk.
SETTLING_STEPS = 4


@dataclass(frozen=True, slots=True)
class StepCost:
    """Measured costs in smoothed seconds; None, or no entry, before the first measurement."""

    decode_s: float | None = None
    """Seconds of a step with decode rows alone."""
    prompt_row_s: float | None = None
    """Seconds of one prompt row."""
    by_rows: Mapping[int, float] = field(default_factory=dict[int, float])
    """Seconds of a step with decode rows alone, by its size (one of SIZES)."""
    steps: int = 0
    """Number of measured steps with decode rows alone."""
    prompt_steps: int = 0
    """Number of measurements of prompt rows."""


def observed(cost: StepCost, *, decode_rows: int, prompt_rows: int, seconds: float) -> StepCost:
    """Returns `cost` updated by a step of these rows that took `seconds`; `decode_rows` includes drafts."""
    if prompt_rows == 0:
        size = _size(decode_rows)
        kept = cost.by_rows if (cost.steps + 1) % MEMORY_STEPS else {}
        by_rows = {**kept, size: smoothed(cost.by_rows.get(size), seconds)}
        return replace(cost, decode_s=smoothed(cost.decode_s, seconds), by_rows=by_rows, steps=cost.steps + 1)
    if prompt_rows < GRAIN:
        return cost  # so few rows cost next to nothing and say little about longer chunks
    above = seconds - (cost.decode_s or 0.0 if decode_rows else 0.0)
    row_s, before = max(above, 0.1 * seconds) / prompt_rows, cost.prompt_row_s
    known = smoothed(before, row_s)
    if before is not None and cost.prompt_steps < SETTLING_STEPS:
        known = min(before, row_s)
    return replace(cost, prompt_row_s=known, prompt_steps=cost.prompt_steps + 1)


def prompt_rows_beside(cost: StepCost, target_s: float, max_rows: int) -> int:
    """Maximum number of prompt rows in a step that also decodes, so that it takes about `target_s` seconds."""
    if cost.prompt_row_s is None:
        return min(FIRST_ROWS, max_rows)
    rows = int((target_s - (cost.decode_s or 0.0)) / cost.prompt_row_s)
    return min(max(LEAST_ROWS, rows // GRAIN * GRAIN), max_rows)


def prompt_rows_alone(cost: StepCost, limit_s: float, max_rows: int) -> int:
    """Maximum number of prompt rows in a step without decode rows, so that it takes at most `limit_s` seconds."""
    return prompt_rows_beside(replace(cost, decode_s=None), limit_s, max_rows)


def patience_s(cost: StepCost, *, decode_rows: int, prompt_rows: int, least_s: float) -> float:
    """Seconds after which a step of these rows counts as stuck.

    At least `least_s`; else STUCK_FACTOR times the measured expectation, plus `least_s` for each FIRST_ROWS rows of a
    kind that was not measured yet.
    """
    unknown = max(0, prompt_rows) if cost.prompt_row_s is None else 0
    expected = 0.0 if cost.prompt_row_s is None else cost.prompt_row_s * prompt_rows
    measured = max((size for size in cost.by_rows if size <= decode_rows), default=None)
    if measured is not None:  # time grows with the number of rows at most in proportion
        expected += cost.by_rows[measured] * decode_rows / measured
    else:
        unknown += decode_rows
    return max(least_s, STUCK_FACTOR * expected + least_s * -(-unknown // FIRST_ROWS))


def draft_rows(cost: StepCost, decode_rows: int) -> int:
    """Maximum number of draft rows in a step of `decode_rows` decode rows without a prompt.

    A step size that was never measured is tried as soon as it is next: all smaller ones were measured.
    """
    alone = cost.by_rows.get(_size(decode_rows))
    if alone is None or decode_rows == 0:
        return 0
    drafts = 0
    for size in SIZES:
        if size <= decode_rows:
            continue
        seconds = cost.by_rows.get(size)
        if seconds is None:
            return size - decode_rows
        if (seconds - alone) / (size - decode_rows) <= RIGHT_SHARE * alone / decode_rows:
            drafts = size - decode_rows
    return drafts


def _size(rows: int) -> int:
    return max((size for size in SIZES if size <= rows), default=SIZES[0])
