"""The cost of a step by its tokens, measured; and from it how many tokens a step may have, and how long it may last.

Beside decode tokens, prompt tokens fill a step up to a target time: without that bound a running request would wait for
a whole chunk of another prompt between two tokens. Prompt tokens alone fill a step that stays far below the step limit,
on a slow CPU too. Drafts are added while a token more costs clearly less than one is worth: tokens are nearly free if a
step waits for memory (weights), and not if it waits for arithmetic. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from blockrelay_worker.policy import STUCK_FACTOR
from blockrelay_worker.scheduling.smoothing import smoothed

#: Prompt tokens of a step before anything was measured; the minimum, so that a prompt gets on; and their multiple.
FIRST_CHUNK, LEAST_CHUNK, GRAIN = 64, 32, 16
#: Decode step sizes (tokens) that are timed separately. Drafts fill a step up to the last one at most.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
#: Share of right drafts at which a draft must already pay.
RIGHT_SHARE = 0.5
#: Decode steps after which all sizes are measured again: one odd measurement must not rule out a size for ever.
MEMORY_STEPS = 1000
#: First measurements of prompt tokens, of which the least counts: these steps also read weights from the disk.
SETTLING_STEPS = 4


@dataclass(frozen=True, slots=True)
class StepCost:
    """Measured costs in smoothed seconds; None, or no entry, before the first measurement."""

    decode_s: float | None = None
    """Seconds of a step with decode tokens alone."""
    prompt_token_s: float | None = None
    """Seconds of one prompt token."""
    by_tokens: Mapping[int, float] = field(default_factory=dict[int, float])
    """Seconds of a step with decode tokens alone, by its size (one of SIZES)."""
    steps: int = 0
    """Number of measured steps with decode tokens alone."""
    prompt_steps: int = 0
    """Number of measurements of prompt tokens."""

    def measured_size(self, tokens: int) -> int | None:
        """Returns the largest measured size of a step with at most `tokens` decode tokens; None if there is none."""
        return max((size for size in self.by_tokens if size <= tokens), default=None)


def observed(cost: StepCost, *, decode_tokens: int, prompt_tokens: int, seconds: float) -> StepCost:
    """Returns `cost` updated by a step of these tokens that took `seconds`; `decode_tokens` includes drafts.

    A step with prompt tokens, but fewer than GRAIN, changes nothing. Every MEMORY_STEPS decode steps, `by_tokens`
    keeps only the size of this step.
    """
    if prompt_tokens == 0:
        size = size_of(decode_tokens)
        kept = cost.by_tokens if (cost.steps + 1) % MEMORY_STEPS else {}
        by_tokens = {**kept, size: smoothed(cost.by_tokens.get(size), seconds)}
        return replace(cost, decode_s=smoothed(cost.decode_s, seconds), by_tokens=by_tokens, steps=cost.steps + 1)
    if prompt_tokens < GRAIN:
        return cost  # so few tokens cost next to nothing and say little about longer chunks
    above = seconds - (cost.decode_s or 0.0 if decode_tokens else 0.0)
    token_s, before = max(above, 0.1 * seconds) / prompt_tokens, cost.prompt_token_s
    known = smoothed(before, token_s)
    if before is not None and cost.prompt_steps < SETTLING_STEPS:
        known = min(before, token_s)
    return replace(cost, prompt_token_s=known, prompt_steps=cost.prompt_steps + 1)


def prompt_tokens_beside(cost: StepCost, target_s: float, max_rows: int) -> int:
    """Maximum number of prompt tokens in a step that also decodes, so that it takes about `target_s` seconds.

    A multiple of GRAIN and at least LEAST_CHUNK, even if that takes longer; FIRST_CHUNK before a measurement. Never
    more than `max_rows`.
    """
    if cost.prompt_token_s is None:
        return min(FIRST_CHUNK, max_rows)
    tokens = int((target_s - (cost.decode_s or 0.0)) / cost.prompt_token_s)
    return min(max(LEAST_CHUNK, tokens // GRAIN * GRAIN), max_rows)


def prompt_tokens_alone(cost: StepCost, limit_s: float, max_rows: int) -> int:
    """Maximum number of prompt tokens in a step without decode tokens, so that it takes at most `limit_s` seconds.

    It is rounded and bounded as in `prompt_tokens_beside`: LEAST_CHUNK tokens are allowed even if they take longer.
    """
    return prompt_tokens_beside(replace(cost, decode_s=None), limit_s, max_rows)


def patience_s(cost: StepCost, *, decode_tokens: int, prompt_tokens: int, least_s: float) -> float:
    """Seconds after which a step of these tokens counts as stuck.

    At least `least_s`; else STUCK_FACTOR times the measured expectation, plus `least_s` for each FIRST_CHUNK tokens of
    a kind that was not measured yet.
    """
    unknown = max(0, prompt_tokens) if cost.prompt_token_s is None else 0
    expected = 0.0 if cost.prompt_token_s is None else cost.prompt_token_s * prompt_tokens
    measured = cost.measured_size(decode_tokens)
    if measured is not None:  # time grows with the number of tokens at most in proportion
        expected += cost.by_tokens[measured] * decode_tokens / measured
    else:
        unknown += decode_tokens
    return max(least_s, STUCK_FACTOR * expected + least_s * -(-unknown // FIRST_CHUNK))


def max_drafts(cost: StepCost, decode_tokens: int) -> int:
    """Maximum number of draft tokens in a step of `decode_tokens` decode tokens without a prompt.

    The largest number whose measured time per draft is at most RIGHT_SHARE of the time per decode token without drafts.
    0 if there is none, and before a step of `decode_tokens`, rounded down to one of SIZES, was measured. Another step
    size that was never measured is tried as soon as it is next: all smaller ones above `decode_tokens` were measured.
    """
    alone = cost.by_tokens.get(size_of(decode_tokens))
    if alone is None or decode_tokens == 0:
        return 0
    drafts = 0
    for size in SIZES:
        if size <= decode_tokens:
            continue
        seconds = cost.by_tokens.get(size)
        if seconds is None:
            return size - decode_tokens
        if (seconds - alone) / (size - decode_tokens) <= RIGHT_SHARE * alone / decode_tokens:
            drafts = size - decode_tokens
    return drafts


def size_of(tokens: int) -> int:
    """Returns the one of SIZES as which a step of `tokens` decode tokens is timed: the largest that is not above."""
    return max((size for size in SIZES if size <= tokens), default=SIZES[0])
