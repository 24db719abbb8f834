"""How many prompt rows a step with decode rows takes along: from measured times towards a target. Pure.

Without a bound a running request waits for a whole chunk of somebody's prompt between two tokens. With too tight a one
prompts crawl, because the weights are read anew for every few rows. So the bound follows what rows cost here.
"""

from dataclasses import dataclass

#: Prompt rows of a mixed step when nothing was measured yet, at least (a prompt always gets on), and their granularity.
FIRST_ROWS, LEAST_ROWS, GRAIN = 64, 32, 16
#: Weight of a new measurement.
SMOOTHING = 0.25


@dataclass(frozen=True, slots=True)
class StepCost:
    """Smoothed seconds: a step of decode rows alone, and each prompt row. None before it was measured."""

    decode_s: float | None = None
    prompt_row_s: float | None = None


def observed(cost: StepCost, *, decode_rows: int, prompt_rows: int, seconds: float) -> StepCost:
    """`cost` after a step of these rows."""
    if prompt_rows == 0:
        return StepCost(_smooth(cost.decode_s, seconds), cost.prompt_row_s)
    if prompt_rows < GRAIN:
        return cost  # such rows cost next to nothing and say little about others
    above = seconds - (cost.decode_s or 0.0 if decode_rows else 0.0)
    return StepCost(cost.decode_s, _smooth(cost.prompt_row_s, max(above, 0.1 * seconds) / prompt_rows))


def prompt_rows_beside(cost: StepCost, target_s: float, max_rows: int) -> int:
    """Prompt rows at most in a step that also decodes, so that it takes about `target_s`."""
    if cost.prompt_row_s is None:
        return min(FIRST_ROWS, max_rows)
    rows = int((target_s - (cost.decode_s or 0.0)) / cost.prompt_row_s)
    return min(max(LEAST_ROWS, rows // GRAIN * GRAIN), max_rows)


def _smooth(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)
