"""Writes `docs/benchmarks.md` and its plot from records. Pure: the same records give the same bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench import cases, published
from bench.plot import bars
from bench.records import Record, faults, median, reports_of, roofline_median, sides_of
from bench.targets import TARGETS
from bench.units import LONG, ON_DEMAND, ON_THE_FILE, OUR_PRECISIONS, OUR_RUNS, PARTS, SCENARIOS, SIZES

PLOT_NAME = "benchmarks.svg"
#: The share of the cores from which the page mentions other work: it changes figures.
BUSY = 0.1


def markdown(records: Sequence[Record]) -> str:
    """Returns the whole page."""
    parts = [
        "# Benchmarks",
        "For people who compare servers, or ask what a release costs.",
        "Written by `make bench ARGS=--publish` from [benchmarks.json](benchmarks.json), which holds every figure of "
        "every round. Do not edit.",
        _machines(records),
        _how(records),
        "## Beside other servers",
        _peers(records),
        f"![rates]({PLOT_NAME})",
        cases.tables(records),
        "## Ratios",
        _targets(records),
        "## Beside the Llama distributor",
        _distributor(records),
        published.table(records),
        "## Details",
        _gateway(records),
        _stages(records),
        _memory(records),
        _roofline(records),
        "## How each figure is measured",
        _commands(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def plot(records: Sequence[Record]) -> str:
    """Returns the plot as SVG: decode rates, and prompt tokens per second."""
    groups: dict[str, dict[str, float]] = {}
    for requests in (1, 4, 16):
        groups[f"new tokens per second, {requests} at once"] = {
            side: value
            for side in sides_of(records, "peers")
            if (value := median(records, "peers", side, "decode_tok_s", requests=requests, prompt=128))
        }
    for requests, prompt in ((1, 128), (16, 128), (1, 2048)):
        groups[f"prompt tokens per second, {requests} x {prompt}"] = {
            side: requests * prompt / value * 1000
            for side in sides_of(records, "peers")
            if (value := median(records, "peers", side, "prefill_ms", requests=requests, prompt=prompt))
        }
    return bars("llama1b shape, random weights", groups, ours=list(OUR_PRECISIONS))


def _machines(records: Sequence[Record]) -> str:
    """Returns a line for each machine: its parts, days and commits, and the other work on it."""
    machines: list[Mapping[str, Any]] = []
    for record in records:
        if record.machine not in machines:
            machines.append(record.machine)
    if not machines:
        return "Nothing was measured yet."
    return "\n".join(_machine(machine, [one for one in records if one.machine == machine]) for machine in machines)


def _machine(machine: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Returns the line of one machine."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    commits = sorted({record.commit for record in records if record.commit})
    days = sorted({record.at[:10] for record in records})
    parts = ", ".join(part for part in PARTS if any(record.part == part for record in records))
    busy = max((record.busy or 0.0 for record in records), default=0.0)
    return (
        f"- {parts}: {machine['cpu']}, {machine['cores']} cores ({', '.join(machine['flags'])}), "
        f"{machine['memory_gib']} GiB, {machine['system']}, Python {machine['python']}; {versions}. "
        f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))}"
        f"{', commit ' + ', '.join(commits) if commits else ''}"
        f"{f'. **Other work took up to {100 * busy:.0f} % of the cores**: not to be compared' if busy >= BUSY else ''}."
    )


def _how(records: Sequence[Record]) -> str:
    """Returns the text that says on which model and how all figures were measured."""
    return (
        "Model: 1.1B parameters in Llama's shape (hidden 2048, "
        "16 layers, 32/8 heads of 64, MLP 8192, vocabulary 32000), random weights; ours over HTTP, in w8a8 where "
        f"nothing else is said. Medians; sides take turns ({_turns(records)}). Figures move with the machine and its "
        "neighbours: compare only those of one run."
    )


def _distributor(records: Sequence[Record]) -> str:
    """Returns the text above the distributor's table, with the columns that are measured on demand or not yet."""
    more = "".join(
        f" {name}: {'on demand' if part in ON_DEMAND else 'not measured yet'}, by {_command(part)}."
        for part, name in published.COLUMNS.items()
        if not reports_of(records, part)
    )
    return (
        "Theirs as published; they say neither the prompt nor the precision, and their first token is one of a session "
        "whose cache is warm: beside it stands that of a session's second step. Ours on the machine above, behind a "
        "prompt of 64 tokens where nothing else is said; files are in the page cache, and times and ratios are medians "
        f"over rounds each.{more}"
    )


def _turns(records: Sequence[Record]) -> str:
    """Returns the number of rounds of each part with several sides."""
    rounds = {part: len({r.round for r in records if r.part == part}) for part in ("peers", "stages")}
    return ", ".join(f"{part}: {count} round{'s' if count != 1 else ''}" for part, count in rounds.items())


def _peers(records: Sequence[Record]) -> str:
    """Returns the table of all servers, with a line for each error."""
    rows = [
        "| | new tokens/s, 1 / 4 / 16 requests | prompt 128, ms | 16 x 128, ms | prompt 2048, ms |",
        "|---|---|---|---|---|",
    ]

    def cell(side: str, figure: str, requests: int, prompt: int) -> str:
        return cases.shown(median(records, "peers", side, figure, requests=requests, prompt=prompt))

    sides = sides_of(records, "peers")
    for side in sorted(sides, key=lambda s: s in OUR_PRECISIONS):  # ours last
        decode = " / ".join(cell(side, "decode_tok_s", n, 128) for n in (1, 4, 16))
        prefill = " | ".join(cell(side, "prefill_ms", n, p) for n, p in ((1, 128), (16, 128), (1, 2048)))
        name = f"**{side}**, through the gateway" if side in OUR_PRECISIONS else side
        rows.append(f"| {name} | {decode} | {prefill} |")
    rows += [f"| {side} | error: {_cell(line)} | | | |" for side, line in _faults(records, "peers")]
    failed = {record.side: record.error for record in records if record.error}
    rows += [f"| {side} | not measured: {_cell(error)} | | | |" for side, error in failed.items() if side not in sides]
    return "\n".join(rows)


def _faults(records: Sequence[Record], part: str) -> list[tuple[str, str]]:
    """Returns a side and a line for each impossible figure of a part."""
    return [(r.side, f"round {r.round + 1}, {line}") for r in records if r.part == part for line in faults(r)]


def _targets(records: Sequence[Record]) -> str:
    """Returns the table of ratios, with floor, aim and verdict of each."""
    rows = ["| | measured | floor | aim | | |", "|---|---|---|---|---|---|"]
    for target in TARGETS:
        sign = "<= " if target.at_most else ""
        measured = target.find(records)
        goals = f"{sign}{target.floor:g} | {sign}{target.aim:g}"
        if measured is None:
            why = f"on demand: {_command(target.on_demand)}" if target.on_demand else "not measured"
            rows.append(f"| {target.name} | {why} | {goals} | | |")
        else:
            verdict = {"aim": "aim reached", "floor": "floor reached", "below": "**missed**"}[
                target.verdict(measured.ratio)
            ]
            rows.append(f"| {target.name} | {measured.ratio:.2f} | {goals} | {verdict} | {measured.note} |")
    return "\n".join(rows)


def _gateway(records: Sequence[Record]) -> str:
    """Returns the table of speeds through the gateway and in process; empty without reports."""
    rows: list[str] = []
    for report in reports_of(records, "gateway"):
        for side, name in (("gateway", "through the gateway"), ("in_process", "in process")):
            for entry in report[side]:
                cpu = f"{entry['client_cpu_s']:.2f} s" if "client_cpu_s" in entry else ""
                figures = " | ".join(
                    f"{entry[key]:.1f}"
                    for key in ("decode_tok_s", "prefill_ms", "ttft_ms_p50", "itl_ms_p50", "itl_ms_p99")
                )
                rows.append(f"| {name} | {entry['requests']} | {figures} | {cpu} |")
    if not rows:
        return ""
    head = "| | requests | new tokens/s | prefill, ms | first token p50 | next token p50 | p99 | CPU of the client |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *rows])


def _stages(records: Sequence[Record]) -> str:
    """Returns the table of speeds with one and two stages; empty without records."""
    rows: list[str] = []
    for side in sides_of(records, "stages"):
        figures = " | ".join(
            "-" if value is None else f"{value:.1f}"
            for figure, requests in (("decode_tok_s", 1), ("decode_tok_s", 16), ("prefill_ms", 1), ("prefill_ms", 16))
            for value in [median(records, "stages", side, figure, requests=requests, prompt=128)]
        )
        rows.append(f"| {side} | {figures} |")
    if not rows:
        return ""
    head = "| | new tokens/s, 1 request | 16 requests | prompt of 128, ms | 16 prompts, ms |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def _memory(records: Sequence[Record]) -> str:
    """Returns the table of workers' memory; empty without reports."""
    rows: list[str] = []
    for part in ("memory", "llama8b"):
        for report in reports_of(records, part):
            rates = ", ".join(f"{e['decode_tok_s']:.1f} at {e['requests']}" for e in report["gateway"])
            for worker in report["memory"]["workers"]:
                sizes = " | ".join(
                    f"{worker[key] / 1e6:.0f}" for key in ("rss_anon", "rss_shmem", "weights", "kv", "peak_rss")
                )
                rows.append(f"| {report['model']} | {report['memory']['ready_s']} | {rates} | {sizes} |")
    if not rows:
        return ""
    head = (
        "| model | ready after, s | new tokens/s at requests | RssAnon, MB | RssShmem | weights | KV in use | "
        "peak, mapped files counted |"
    )
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *rows])


def _roofline(records: Sequence[Record]) -> str:
    """Returns what the machine gives, and the table of steps beside it; empty without reports."""
    rows: list[str] = []
    for side in OUR_PRECISIONS:
        seen: dict[tuple[str, int, int], None] = {}
        for report in reports_of(records, "roofline", side):
            seen |= {(one["case"], one["requests"], one["prompt"]): None for one in report["roofline"]["cases"]}
        for case in seen:
            cells = [f"{side}: {case[0]}, {case[1]} x {case[2]}"]
            for kind in ("layers", "head", "step"):
                values = [roofline_median(records, side, case, (kind, name)) for name in ("needed_ms", "seen_ms")]
                cells.append(" / ".join("-" if value is None else f"{value:.1f}" for value in values))
            ratio = roofline_median(records, side, case, ("step", "ratio"))
            rows.append(f"| {' | '.join(cells)} | {'-' if ratio is None else f'{ratio:.2f}'} |")
    if not rows:
        return ""
    peaks = [report["roofline"] for report in reports_of(records, "roofline")]
    memory, units, floats = (
        max(peak[name] for peak in peaks) for name in ("memory_gb_s", "byte_gmac_s", "float_gmac_s")
    )
    head = (
        f"All threads read {memory:.1f} GB/s from memory, and make {units:.0f} billion multiply-adds of bytes a second "
        f"in registers, or {floats:.0f} of float32 ({peaks[0]['kernels']}; the best of all rounds). A block needs the "
        "longer one of two times: to read its weights and the keys and values, and to multiply."
    )
    table = ["| milliseconds needed / seen | layers | head | all | needed over seen |", "|---|---|---|---|---|"]
    return "\n".join([head, "", *table, *rows])


def _commands() -> str:
    """Returns a list of the commands that measure each part."""
    lines = [f"- peers: `blockrelay bench {SIZES}` and `blockrelay bench {LONG}` beside `bench/peers/`"]
    for part, sides in OUR_RUNS.items():
        each = dict.fromkeys((runs.shape, options) for runs in sides.values() for options in runs.options)
        several = len({shape for shape, _ in each}) > 1
        commands = " and ".join(f"`blockrelay bench {run}`{f' ({shape})' if several else ''}" for shape, run in each)
        beside = f", beside {ON_THE_FILE[1]}" if part == "real" else ""
        lines.append(f"- {part}{' (on demand)' if part in ON_DEMAND else ''}: {commands}{beside}")
    for part, scenario in SCENARIOS.items():
        of = f"`python -m bench.scenarios.{scenario} --model DIR`"
        lines.append(f"- {part}{' (on demand)' if part in ON_DEMAND else ''}: {of}")
    again = '`make bench ARGS="--only PART --again"` measures a part again; parts: '
    return "\n".join([*lines, "", again + ", ".join(PARTS) + "."])


def _command(part: str) -> str:
    return f'`make bench ARGS="--only {part}"`'


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
