"""What the KV cache saves: one request at a time, with it and without (`use_cache: false`), in turns."""

import random
import statistics
from typing import Any

from blockrelay_launcher.bench.figures import Round, random_prompts
from blockrelay_launcher.bench.targets import GatewaySide

#: New tokens of a request that is measured both ways, and of the one whose steps must not grow.
NEW, LONG_NEW = 20, 50
#: What a session's second step adds to its first one.
ADDED = 8
#: The steps that are compared: to tokens 11 to 20, and 41 to 50.
EARLY, LATE = (10, 20), (40, 50)


def kv_cache_figures(
    gateway: GatewaySide, dice: random.Random, *, vocab_size: int, prompt: int, rounds: int
) -> dict[str, Any]:
    """Medians over rounds: ratios of the time without the cache to that with it (`whole`, `step`, `second_step_first`),
    and `growth`, the time of steps 41 to 50 over that of 11 to 20."""
    found: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            found.setdefault(name, []).append(value)

    for number in range(-1, rounds):
        (asked,) = random_prompts(dice, vocab_size, 1, prompt)
        (again,) = random_prompts(dice, vocab_size, 1, prompt)
        (added,) = random_prompts(dice, vocab_size, 1, ADDED)
        kept = gateway.round([asked], LONG_NEW)
        on, off = gateway.round([again], NEW), gateway.round([asked], NEW, use_cache=False)
        second_on = gateway.round([asked + added], 2)
        second_off = gateway.round([asked + added], 2, use_cache=False)
        if number < 0:
            continue  # warms up
        note(
            whole_on_ms=1000 * on.total_s,
            whole_off_ms=1000 * off.total_s,
            step_on_ms=1000 * step_s(on),
            step_off_ms=1000 * step_s(off),
            second_step_on_ms=1000 * second_on.prefill_s,
            second_step_off_ms=1000 * second_off.prefill_s,
            early_step_ms=1000 * step_s(kept, *EARLY),
            late_step_ms=1000 * step_s(kept, *LATE),
            growth=growth(kept),
        )
    figures = {name: round(statistics.median(values), 3) for name, values in found.items()}
    for name in ("whole", "step", "second_step"):
        ratios = [off / on for on, off in zip(found[f"{name}_on_ms"], found[f"{name}_off_ms"], strict=True)]
        figures[name] = round(statistics.median(ratios), 3)
    return {"prompt": prompt, "new": NEW, **figures}


def step_s(one: Round, first: int = 1, last: int | None = None) -> float:
    """Mean time of the steps behind token `first` up to token `last` (default: the last one) of the only request."""
    (came,) = one.tokens
    last = len(came) if last is None else last
    return max(came[last - 1] - came[first - 1], 1e-9) / (last - first)


def growth(one: Round) -> float:
    """How much longer the later steps of a request of LONG_NEW tokens take than the early ones."""
    return step_s(one, *LATE) / step_s(one, *EARLY)
