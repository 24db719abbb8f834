"""Measures the gain of the KV cache: one request at a time, with and without it (`use_cache: false`), in turns."""

import statistics
from collections import defaultdict
from typing import Any

from blockrelay_launcher.bench.figures import DrawPrompts, Round
from blockrelay_launcher.bench.options import LONG_NEW
from blockrelay_launcher.bench.targets import GatewaySide

#: New tokens of a request that is measured both ways.
NEW = 20
#: Tokens that a session's second step adds to its first one.
ADDED = 8
#: The steps that are compared: those to tokens 11 to 20, and 41 to 50.
EARLY, LATE = (10, 20), (40, 50)


def kv_cache_figures(gateway: GatewaySide, draw: DrawPrompts, *, prompt: int, rounds: int) -> dict[str, Any]:
    """Measures requests with and without the cache and returns medians over `rounds` rounds.

    Prompts are `prompt` token ids of `draw`; the context must hold LONG_NEW more. One more round warms up. The figures
    that end with `_ms` are milliseconds, with the cache (`_on_ms`) and without it (`_off_ms`): of a `whole` request of
    NEW tokens, of a mean `step` of it, and until the first token of a `second_step`. Without `_ms`, these names are
    ratios of the time without the cache to that with it.

    `early_step_ms` and `late_step_ms` are mean steps to tokens 11 to 20 and 41 to 50 with the cache; `growth` is the
    late one over the early one. Raises ServiceUnavailable if an answer does not come to its end.
    """
    by_name: dict[str, list[float]] = defaultdict(list)
    for number in range(-1, rounds):
        (first, again), (added,) = draw(2, prompt), draw(1, ADDED)
        kept = gateway.round([first], LONG_NEW)
        on, off = gateway.round([again], NEW), gateway.round([first], NEW, use_cache=False)
        second_on = gateway.round([first + added], 2)
        second_off = gateway.round([first + added], 2, use_cache=False)
        if number < 0:
            continue  # the first round only warms up
        by_name["whole_on_ms"].append(1000 * on.total_s)
        by_name["whole_off_ms"].append(1000 * off.total_s)
        by_name["step_on_ms"].append(1000 * step_s(on))
        by_name["step_off_ms"].append(1000 * step_s(off))
        by_name["second_step_on_ms"].append(1000 * second_on.prefill_s)
        by_name["second_step_off_ms"].append(1000 * second_off.prefill_s)
        by_name["early_step_ms"].append(1000 * step_s(kept, *EARLY))
        by_name["late_step_ms"].append(1000 * step_s(kept, *LATE))
        by_name["growth"].append(growth(kept))
    figures = {name: round(statistics.median(values), 3) for name, values in by_name.items()}
    for name in ("whole", "step", "second_step"):
        ratios = [off / on for on, off in zip(by_name[f"{name}_on_ms"], by_name[f"{name}_off_ms"], strict=True)]
        figures[name] = round(statistics.median(ratios), 3)
    return {"prompt": prompt, "new": NEW, **figures}


def step_s(one: Round, first: int = 1, last: int | None = None) -> float:
    """Returns the mean seconds of a step from token `first` to token `last` (None: the last one), counted from 1.

    `one` must have a single request.
    """
    (came,) = one.tokens
    last = len(came) if last is None else last
    return max(came[last - 1] - came[first - 1], 1e-9) / (last - first)


def growth(one: Round) -> float:
    """Returns the mean time of the LATE steps over that of the EARLY ones; `one` is a request of LONG_NEW tokens."""
    return step_s(one, *LATE) / step_s(one, *EARLY)
