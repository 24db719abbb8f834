"""The Llama distributor's published figures of Llama-2-7B in two parts on two GPUs, and ours in one table. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.records import Record, reports_of

#: The name of the model in the table, by part of `make bench`.
COLUMNS = {"distributor": "1.1B parameters", "llama2_7b": "Llama-2-7B's shape"}
#: Tokens of the prompt after which the part `kv_cache` measures a session's second step.
LONG_PROMPT = 512
Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: a figure's name, the published value, and ours for each measured model."""

    name: str
    theirs: str
    ours: tuple[str, ...]


def rows(reports: Sequence[Report], long_prompt: Mapping[str, float] | None = None) -> list[Row]:
    """Returns the rows of the table from reports of `bench.scenarios.distributor`, one for each model.

    `long_prompt` is what the part `kv_cache` measured after LONG_PROMPT tokens, for the first report.
    """
    second = [_second_step(report["kv_cache"][0]) for report in reports]
    if second and long_prompt is not None:
        second[0] += f"; behind {LONG_PROMPT} tokens {_second_step(long_prompt)}"
    found = [
        ("load the whole model", "3.5 s", [_seconds(one["load_s"]) for one in reports]),
        ("split it into two parts", "1.2 s", [_seconds(one["split_s"]) for one in reports]),
        ("weights of both parts", "2.8 s", [_seconds(one["weights_s"]) for one in reports]),
        ("init: here every block gives its known answer", "0.5 s", [_seconds(one["init_s"]) for one in reports]),
        ("all services ready, from nothing", "-", [_seconds(one["memory"]["ready_s"]) for one in reports]),
        ("memory of a part", "4.5 GB", [_memory(one["memory"]["workers"]) for one in reports]),
        ("20 tokens, KV cache and none", _pair(0.84, 1.55, "1.8x"), [_ratio(one, "whole") for one in reports]),
        ("a step, cache and none", _pair(0.015, 0.045, "3.0x"), [_ratio(one, "step") for one in reports]),
        ("first token, cache warm and none", _pair(0.015, 0.411, "27.4x"), second),
        ("first token of a new prompt", "-", [_first(one) for one in reports]),
        ("a step early and late in 50 tokens", _pair(0.019, 0.014, "0.73"), [_growth(one) for one in reports]),
        ("hop between parts", "under 1 ms", [_hop(one) for one in reports]),
        ("new tokens/s, one request", "19.8", [f"{_decode(one)['decode_tok_s']:.1f}" for one in reports]),
        ("output of the parts equals that of the whole", "yes", [_same(one) for one in reports]),
        ("failed requests", "0", [f"0 of {one['requests']}" for one in reports]),
    ]
    return [Row(name, theirs, tuple(ours)) for name, theirs, ours in found]


def table(records: Sequence[Record]) -> str:
    """Returns the table in Markdown: the published figures, and a column for each measured model."""
    measured = {part: found[-1] for part in COLUMNS if (found := reports_of(records, part))}
    long = [
        one for report in reports_of(records, "kv_cache") for one in report["kv_cache"] if one["prompt"] == LONG_PROMPT
    ]
    lines = [
        _cells(
            "", "theirs: Llama-2-7B, 2 GPUs", *(f"here: {COLUMNS[part]}, {_how(one)}" for part, one in measured.items())
        ),
        "|---" * (2 + len(measured)) + "|",
    ]
    only_first = long[0] if long and "distributor" in measured else None
    lines += [_cells(row.name, row.theirs, *row.ours) for row in rows(list(measured.values()), only_first)]
    return "\n".join(lines)


def plain(report: Report) -> str:
    """Returns the table of one report for a terminal."""
    shown = [
        ("", "theirs", f"{report['model']}, {_how(report)}"),
        *((r.name, r.theirs, r.ours[0]) for r in rows([report])),
    ]
    widths = [max(len(line[column]) for line in shown) for column in range(2)]
    return "\n".join(f"{name:{widths[0]}}  {theirs:{widths[1]}}  {ours}" for name, theirs, ours in shown)


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _how(report: Report) -> str:
    return f"{report['precision']}, {report['parts']} workers of {report['threads']} threads"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.2g} ms"


def _pair(one: float, other: float, ratio: str) -> str:
    return f"{one:.3g} s, {other:.3g} s: {ratio}"


def _ms_pair(one_ms: float, other_ms: float, ratio: str) -> str:
    return _pair(one_ms / 1000, other_ms / 1000, ratio)


def _ratio(report: Report, what: str) -> str:
    cache = report["kv_cache"][0]
    return _ms_pair(cache[f"{what}_on_ms"], cache[f"{what}_off_ms"], f"{cache[what]:.1f}x")


def _second_step(cache: Mapping[str, float]) -> str:
    return _ms_pair(cache["second_step_on_ms"], cache["second_step_off_ms"], f"{cache['second_step']:.1f}x")


def _growth(report: Report) -> str:
    cache = report["kv_cache"][0]
    return _ms_pair(cache["early_step_ms"], cache["late_step_ms"], f"{cache['growth']:.2f}")


def _decode(report: Report) -> Mapping[str, float]:
    return report["gateway"][0]


def _first(report: Report) -> str:
    entry = _decode(report)
    return f"{entry['ttft_ms_p50'] / 1000:.3g} s behind {entry['prompt']} tokens"


def _memory(workers: Sequence[Mapping[str, float]]) -> str:
    own = " and ".join(f"{(one['rss_anon'] + one['rss_shmem']) / 1e9:.2f}" for one in workers)
    return f"{own} GB"


def _hop(report: Report) -> str:
    return f"{1000 * report['hop_s']:.2g} ms; in one process {1000 * report['copy_s']:.2g} ms"


def _same(report: Report) -> str:
    return "yes, bit by bit" if report["same"] else "**no**"
