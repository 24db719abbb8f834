"""The tables of cases that people have: a public model, sampled tokens, large vocabularies, many requests.

Pure: the same records give the same text.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from bench.records import Record, median, reports_of, sides_of
from bench.units import OURS, REAL, WORDS

#: Why sampled tokens take longer on the models of 1.1B parameters.
RANDOM_WEIGHTS = (
    "Random weights make thousands of words about as likely as each other, so that sampling has to order far more of "
    "them than with a trained model: the public model shows what people get, the others the worst case."
)


def tables(records: Sequence[Record]) -> str:
    """Returns all tables, each below a heading; parts that were not measured have none."""
    named = (
        (f"## A public model: {REAL}", _real(records)),
        ("## Sampled tokens and large vocabularies", _sampled(records)),
        ("## Many requests and long prompts", _sizes(records)),
    )
    return "\n\n".join(f"{heading}\n\n{table}" for heading, table in named if table)


def sampled_ratio(records: Sequence[Record], part: str, side: str, requests: int) -> float | None:
    """Returns how fast sampled tokens come beside greedy ones through the gateway, the median of all rounds."""
    every = [entry for report in reports_of(records, part, side) for entry in report["sampled"]]
    ratios = [float(entry["gateway"]["ratio"]) for entry in every if entry["requests"] == requests]
    return statistics.median(ratios) if ratios else None


def _real(records: Sequence[Record]) -> str:
    rows = [
        f"| {side} | {_cells(records, 'real', side, 'decode_tok_s')} | {_cells(records, 'real', side, 'prefill_ms')} |"
        for side in sides_of(records, "real")
    ]
    rows += [f"| {r.side} | not measured: {r.error} | |" for r in records if r.part == "real" and r.error]
    if not rows:
        return ""
    head = "| | new tokens/s, 1 / 4 / 16 requests | prompts of 128, 1 / 4 / 16 at once, ms |"
    return "\n".join([head, "|---|---|---|", *rows])


def _cells(records: Sequence[Record], part: str, side: str, figure: str) -> str:
    return " / ".join(
        shown(median(records, part, side, figure, requests=requests, prompt=128)) for requests in (1, 4, 16)
    )


def _sampled(records: Sequence[Record]) -> str:
    rows: list[str] = []
    for part, side in (("sampled", OURS), *(("vocabulary", words) for words in WORDS)):
        ratios = [sampled_ratio(records, part, side, requests) for requests in (1, 16)]
        greedy = [median(records, part, side, "decode_tok_s", requests=requests, prompt=128) for requests in (1, 16)]
        if any(ratio is not None for ratio in ratios):
            name = f"{REAL}, {side}" if part == "sampled" else f"1.1B parameters, {side}"
            cells = [" / ".join(map(shown, greedy)), " / ".join("-" if r is None else f"{r:.3f}" for r in ratios)]
            rows.append(f"| {name} | {' | '.join(cells)} |")
    if not rows:
        return ""
    if any(side in WORDS for side in sides_of(records, "vocabulary")):
        rows += ["", RANDOM_WEIGHTS]
    head = "| | greedy tokens/s, 1 / 16 requests | sampled over greedy, 1 / 16 (temperature 0.6, top-p 0.9) |"
    return "\n".join([head, "|---|---|---|", *rows])


def _sizes(records: Sequence[Record]) -> str:
    every: list[dict[str, Any]] = [entry for report in reports_of(records, "sizes") for entry in report["gateway"]]
    rows: list[str] = []
    for entry in every:
        requests, prompt, prefill_ms = entry["requests"], entry["prompt"], entry["prefill_ms"]
        cells = (entry["decode_tok_s"], prefill_ms, requests * prompt / prefill_ms * 1000)
        rows.append(f"| {requests} x {prompt} | {' | '.join(map(shown, cells))} |")
    if not rows:
        return ""
    head = "| 1.1B parameters, w8a8 | new tokens/s | prompts, ms | prompt tokens/s |"
    return "\n".join([head, "|---|---|---|---|", *rows])


def shown(value: float | None) -> str:
    """Returns a figure as tables have it; a dash for None."""
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"
