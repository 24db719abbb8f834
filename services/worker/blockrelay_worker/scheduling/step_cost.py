"""What rows cost on this machine, from measured steps, what a step may therefore take along, and how long it may last.
Pure.

Beside decode rows, prompt rows fill a step up to a target time: without a bound a running request waits for a whole
chunk of somebody's prompt between two tokens. Prompt rows alone fill one that is far from the end of the worker's
patience, on a slow CPU too. Guessed tokens come along as far as a row costs clearly less than a token
is worth: where the weights are what a step waits for, rows are nearly free; where arithmetic is, none is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from blockrelay_worker.scheduling.smoothing import smoothed

#: Prompt rows of a step when nothing was measured yet, at least (a prompt always gets on), and their granularity.
FIRST_ROWS, LEAST_ROWS, GRAIN = 64, 32, 16
#: Sizes of decode steps whose times are kept apart. The last is the most that drafts may fill.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
#: A guess must pay already when only this share of guesses turns out right.
RIGHT_SHARE = 0.5
#: Decode steps after which sizes are measured anew: one odd measurement must not rule out a size for ever.
MEMORY_STEPS = 1000
#: Measurements of prompt rows of which the least counts: the first steps also read weights from the disk.
SETTLING_STEPS = 4
#: A step that lasts so many times what it should is stuck.
PATIENCE = 4


@dataclass(frozen=True, slots=True)
class StepCost:
    """Smoothed seconds: a step of decode rows alone, the same by number of rows (one of SIZES), and each prompt row.

    None, or no entry, before it was measured.
    """

    decode_s: float | None = None
    prompt_row_s: float | None = None
    by_rows: Mapping[int, float] = field(default_factory=dict[int, float])
    steps: int = 0
    prompt_steps: int = 0


def observed(cost: StepCost, *, decode_rows: int, prompt_rows: int, seconds: float) -> StepCost:
    """`cost` after a step of these rows; `decode_rows` counts drafts too."""
    if prompt_rows == 0:
        size = _size(decode_rows)
        kept = cost.by_rows if (cost.steps + 1) % MEMORY_STEPS else {}
        by_rows = {**kept, size: smoothed(cost.by_rows.get(size), seconds)}
        return replace(cost, decode_s=smoothed(cost.decode_s, seconds), by_rows=by_rows, steps=cost.steps + 1)
    if prompt_rows < GRAIN:
        return cost  # such rows cost next to nothing and say little about others
    above = seconds - (cost.decode_s or 0.0 if decode_rows else 0.0)
    row_s, before = max(above, 0.1 * seconds) / prompt_rows, cost.prompt_row_s
    known = smoothed(before, row_s)
    if before is not None and cost.prompt_steps < SETTLING_STEPS:
        known = min(before, row_s)
    return replace(cost, prompt_row_s=known, prompt_steps=cost.prompt_steps + 1)


def prompt_rows_beside(cost: StepCost, target_s: float, max_rows: int) -> int:
    """Prompt rows at most in a step that also decodes, so that it takes about `target_s`."""
    if cost.prompt_row_s is None:
        return min(FIRST_ROWS, max_rows)
    rows = int((target_s - (cost.decode_s or 0.0)) / cost.prompt_row_s)
    return min(max(LEAST_ROWS, rows // GRAIN * GRAIN), max_rows)


def prompt_rows_alone(cost: StepCost, most_s: float, max_rows: int) -> int:
    """Prompt rows at most in a step without decode rows, so that it takes no longer than `most_s`."""
    return prompt_rows_beside(replace(cost, decode_s=None), most_s, max_rows)


def patience_s(cost: StepCost, *, decode_rows: int, prompt_rows: int, least_s: float) -> float:
    """How long a step of these rows may last before it counts as stuck: `least_s`, longer where it should take long by
    what was measured, and `least_s` for each FIRST_ROWS of which nothing was measured yet."""
    unknown = max(0, prompt_rows) if cost.prompt_row_s is None else 0
    expected = 0.0 if cost.prompt_row_s is None else cost.prompt_row_s * prompt_rows
    measured = max((size for size in cost.by_rows if size <= decode_rows), default=None)
    if measured is not None:  # more rows take at most as many times longer
        expected += cost.by_rows[measured] * decode_rows / measured
    else:
        unknown += decode_rows
    return max(least_s, PATIENCE * expected + least_s * -(-unknown // FIRST_ROWS))


def draft_rows(cost: StepCost, decode_rows: int) -> int:
    """Draft rows at most in a step of `decode_rows` known rows and no prompt.

    A size that was never measured is tried once all smaller ones paid.
    """
    alone = cost.by_rows.get(_size(decode_rows))
    if alone is None or decode_rows == 0:
        return 0
    most = 0
    for size in SIZES:
        if size <= decode_rows:
            continue
        seconds = cost.by_rows.get(size)
        if seconds is None:
            return size - decode_rows
        if (seconds - alone) / (size - decode_rows) <= RIGHT_SHARE * alone / decode_rows:
            most = size - decode_rows
    return most


def _size(rows: int) -> int:
    return max((size for size in SIZES if size <= rows), default=SIZES[0])
