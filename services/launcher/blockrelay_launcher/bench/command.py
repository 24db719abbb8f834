"""Runs `blockrelay bench`: measures the gateway and the executor alone in alternating rounds, and their ratio."""

import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.host.cpu import cores
from blockrelay.protocol.constants import PAGE_TOKENS
from blockrelay.settings import WorkerSettings
from blockrelay_launcher.background import running_up
from blockrelay_launcher.bench.figures import GREEDY, Drawing, DrawPrompts, Round, figures, random_prompts, ratio
from blockrelay_launcher.bench.kv_cache import kv_cache_figures
from blockrelay_launcher.bench.machine import describe_machine
from blockrelay_launcher.bench.memory import Scales
from blockrelay_launcher.bench.options import OWN_TOKENS, PREFIX_NEW, BenchOptions
from blockrelay_launcher.bench.targets import GatewaySide, InProcessSide, check_gateway, in_process, roofline

#: New tokens of the unmeasured round before the measured ones.
WARM_UP_NEW = 4
#: How tokens are drawn with `--sampled`: what chat models recommend.
SAMPLED = Drawing(temperature=0.6, top_p=0.9)
#: Mean number of tokens per arrival from which the tables mention it.
SEVERAL = 1.05
#: Width that the tables need, in characters.
SHOWN_WIDTH = 108


def run_bench(options: BenchOptions, *, as_json: bool) -> int:
    """Measures, prints the report (tables, or one JSON object if `as_json`) and returns 0.

    Raises BlockFolderError for a wrong block folder, UsageError for options that do not suit the model or the gateway,
    and ServiceUnavailable if a measured system does not start or an answer does not come to its end.
    """
    folder = open_block_folder(options.model, blocks=[])
    options.check_for(folder)
    if options.url:
        check_gateway(options.url, folder.model.name)
    report = _measure(options, folder)
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        show(report)
    return 0


def _measure(options: BenchOptions, folder: BlockFolder) -> dict[str, Any]:
    """Runs all measurements and returns the report, the object of `--json`."""
    report: dict[str, Any] = {
        "gateway": [],
        "in_process": [],
        "ratio": [],
        "model": folder.model.name,
        "precision": folder.manifest.precision,
        "options": {
            "stages": None if options.url else options.stages,
            "threads": None if options.url else options.worker_threads,
            "rounds": options.rounds,
            "speculation": options.speculation,
        },
        "machine": describe_machine(),
    }
    draw = partial(random_prompts, random.Random(time.time_ns()), folder.model.vocab_size)
    if options.roofline:
        report["roofline"] = roofline(
            options.model,
            threads=_all_threads(options),
            max_rows=WorkerSettings().max_rows,
            requests=options.request_counts,
            prompts=options.prompt_lengths,
        )
    if options.memory:
        report["memory"] = _weigh(options, folder, draw)
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(_own_up(options))
        gateway = stack.enter_context(contextlib.closing(GatewaySide(url, folder.model.name)))
        direct = stack.enter_context(_own_process(options)) if options.in_process else None
        _compare(report, gateway, direct, draw, options)
        if options.prefix:
            report["prefix"] = _shared_prefix(gateway, options, draw)
        if options.kv_cache:
            report["kv_cache"] = [
                kv_cache_figures(gateway, draw, prompt=prompt, rounds=options.rounds)
                for prompt in options.prompt_lengths
            ]
    return report


@dataclass(frozen=True, slots=True)
class _Case:
    """One configuration, with its rounds through the gateway (`through`) and in process (`inside`)."""

    requests: int
    prompt: int
    """Tokens of each prompt."""
    drawing: Drawing
    through: list[Round] = field(default_factory=list[Round])
    inside: list[Round] = field(default_factory=list[Round])


def _compare(
    report: dict[str, Any],
    gateway: GatewaySide,
    direct: InProcessSide | None,
    draw: DrawPrompts,
    options: BenchOptions,
) -> None:
    """Measures all configurations in turns, each on both sides, so that changes of the machine affect all alike."""
    drawings = [GREEDY, SAMPLED] if options.sampled else [GREEDY]
    sizes = [(requests, prompt) for prompt in options.prompt_lengths for requests in options.request_counts]
    cases = [_Case(*size, drawing) for size in sizes for drawing in drawings]
    for number in range(-1, options.rounds):
        for case in cases:
            drawn = draw(case.requests, case.prompt)
            new = options.new if number >= 0 else min(options.new, WARM_UP_NEW)
            one = gateway.round(drawn, new, drawing=case.drawing)
            other = direct.round(drawn, new, drawing=case.drawing) if direct else None
            if number >= 0:
                case.through.append(one)
                case.inside.extend([other] if other else [])
    for case in cases[:: len(drawings)]:
        report["gateway"].append(figures(case.through, prompt=case.prompt))
        if case.inside:
            report["in_process"].append(figures(case.inside, prompt=case.prompt))
            report["ratio"].append(ratio(case.through, case.inside, prompt=case.prompt))
    if options.sampled:
        report["sampled"] = [_sampled(*pair) for pair in zip(cases[::2], cases[1::2], strict=True)]


def _sampled(greedy: _Case, sampled: _Case) -> dict[str, Any]:
    """Returns how fast sampled tokens come beside greedy ones, on each side (1: as fast)."""
    entry: dict[str, Any] = {"requests": sampled.requests, "prompt": sampled.prompt, **asdict(sampled.drawing)}
    for side, some, others in (
        ("gateway", sampled.through, greedy.through),
        ("in_process", sampled.inside, greedy.inside),
    ):
        if some:
            entry[side] = {
                "decode_tok_s": figures(some, prompt=sampled.prompt)["decode_tok_s"],
                "ratio": ratio(some, others, prompt=sampled.prompt)["decode"],
            }
    return entry


def _shared_prefix(gateway: GatewaySide, options: BenchOptions, draw: DrawPrompts) -> dict[str, Any]:
    """Returns the median times to first token of two requests in sequence that begin with the same tokens."""
    first, second = list[float](), list[float]()
    for _ in range(options.rounds):
        [prefix] = draw(1, options.prefix)
        for times in (first, second):
            [own] = draw(1, OWN_TOKENS)
            times.append(gateway.round([prefix + own], PREFIX_NEW).prefill_s)
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    return {
        "tokens": options.prefix,
        "own_tokens": OWN_TOKENS,
        "first_ttft_ms": round(1000 * statistics.median(first), 3),
        "second_ttft_ms": round(1000 * statistics.median(second), 3),
        "ratio": round(statistics.median(ratios), 4),
    }


def _weigh(options: BenchOptions, folder: BlockFolder, draw: DrawPrompts) -> dict[str, Any]:
    """Starts a system, runs the largest round once, and measures the workers' memory meanwhile."""
    started = time.monotonic()
    requests, prompt = max(options.request_counts), max(options.prompt_lengths)
    with tempfile.TemporaryDirectory(prefix="blockrelay-") as data, _own_up(options, data=Path(data)) as url:
        ready_s = time.monotonic() - started
        scales = Scales(folder, Path(data))
        with contextlib.closing(GatewaySide(url, folder.model.name)) as gateway:
            scales.start()
            try:
                gateway.round(draw(requests, prompt), options.new)
            finally:
                weights = scales.stop()
    return {
        "requests": requests,
        "prompt": prompt,
        "ready_s": round(ready_s, 2),
        "workers": [weight.entry() for weight in weights],
    }


def _own_up(options: BenchOptions, data: Path | None = None) -> contextlib.AbstractContextManager[str]:
    arguments = ["--threads", str(options.worker_threads)]
    arguments += ["--speculation" if options.speculation else "--no-speculation"]
    if data is not None:
        arguments += ["--data", str(data)]
    return running_up(options.model, options.stages, *arguments)


@contextlib.contextmanager
def _own_process(options: BenchOptions) -> Iterator[InProcessSide]:
    """Yields the executor as one stage, with as many threads as all workers have together, at most the cores."""
    threads = _all_threads(options) if not options.url else cores()
    pages = max(options.request_counts) * -(-(max(options.prompt_lengths) + options.new) // PAGE_TOKENS)
    with in_process(options.model, threads=threads, max_rows=WorkerSettings().max_rows, pages=pages) as side:
        yield side


def _all_threads(options: BenchOptions) -> int:
    """The threads of all workers together, at most the cores."""
    return min(options.worker_threads * options.stages, cores())


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Prints `report`, the object of `--json`, as tables on `console` (None: stdout).

    A console that is too narrow for the tables is set to SHOWN_WIDTH.
    """
    console = console or Console()
    console.width = max(console.width, SHOWN_WIDTH)
    machine, options = report["machine"], report["options"]
    console.print(f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}")
    if options["stages"]:
        console.print(f"{options['stages']} stages, {options['threads']} threads each")
    table = Table(title=f"{report['model']}, {report['precision']}; times in ms")
    for column in ("side", "requests", "prompt", "decode tok/s", "prefill", "first token", "next", "p99", "client CPU"):
        table.add_column(column, no_wrap=True, justify="left" if column == "side" else "right")
    for side, name in (("gateway", "gateway"), ("in_process", "in process")):
        for entry in report[side]:
            cpu = f"{100 * entry['client_cpu_share']:.1f} %" if "client_cpu_share" in entry else ""
            keys = ("decode_tok_s", "prefill_ms", "ttft_ms_p50", "itl_ms_p50", "itl_ms_p99")
            shown = ("-" if entry[key] is None else f"{entry[key]:.1f}" for key in keys)
            table.add_row(name, str(entry["requests"]), str(entry["prompt"]), *shown, cpu)
    for entry in report["ratio"]:
        shown = (f"{entry['decode']:.3f}", f"{entry['prefill']:.3f}")
        table.add_row("ratio", str(entry["requests"]), str(entry["prompt"]), *shown)
    console.print(table)
    for entry in report.get("sampled", ()):
        sides = (("gateway", "through the gateway"), ("in_process", "in process"))
        shown = (f"{entry[side]['ratio']:.3f} of greedy {name}" for side, name in sides if side in entry)
        console.print(
            f"temperature {entry['temperature']}, top-p {entry['top_p']}, {entry['requests']} requests, prompt "
            f"{entry['prompt']}: decode {', '.join(shown)}"
        )
    together = max((entry["tokens_at_once"] for entry in report["gateway"]), default=1.0)
    if together >= SEVERAL:
        console.print(
            f"up to {together:.1f} tokens came at once, on average: `next` is the time per token, divided evenly"
        )
    if prefix := report.get("prefix"):
        console.print(
            f"shared prefix of {prefix['tokens']} tokens: first token after {prefix['first_ttft_ms']:.0f} ms, "
            f"then after {prefix['second_ttft_ms']:.0f} ms ({prefix['ratio']:.3f} of it)"
        )
    for cache in report.get("kv_cache", ()):
        console.print(
            f"KV cache, prompt of {cache['prompt']}, {cache['new']} tokens: {cache['whole_on_ms']:.0f} ms, without it "
            f"{cache['whole_off_ms']:.0f} ({cache['whole']:.2f}x), a step {cache['step']:.2f}x, the first token of a "
            f"session's second step {cache['second_step']:.1f}x; steps 41 to 50 take {cache['growth']:.3f} of 11 to 20"
        )
    if roof := report.get("roofline"):
        _show_roofline(roof, console)
    if memory := report.get("memory"):
        console.print(f"ready after {memory['ready_s']} s")
        for worker in memory["workers"]:
            mb = {name: f"{value / 1e6:.0f} MB" for name, value in worker.items() if name not in ("worker", "ratio")}
            console.print(
                f"worker of stage {worker['stage']}: {mb['rss_anon']} anonymous and {mb['rss_shmem']} shared memory, "
                f"{worker['ratio']:.3f} of its weights ({mb['weights']}) and KV in use ({mb['kv']}); "
                f"peak {mb['peak_rss']} with mapped files"
            )


def _show_roofline(report: dict[str, Any], console: Console) -> None:
    """Prints what the machine gives, and a line for each case: milliseconds needed and seen, and their ratio."""
    console.print(
        f"kernels {report['kernels']}: memory gives {report['memory_gb_s']} GB/s, registers {report['byte_gmac_s']} "
        f"billion multiply-adds of bytes a second, {report['float_gmac_s']} of float32"
    )
    table = Table(title="needed and seen, ms")
    for column in ("case", "layers", "head", "all", "share of the roofline", "bound by"):
        table.add_column(column, no_wrap=True, justify="left" if column == "case" else "right")
    for entry in report["cases"]:
        kinds = [entry[kind] for kind in ("layers", "head", "step")]
        shown = (f"{kind['needed_ms']:.1f} / {kind['seen_ms']:.1f}" for kind in kinds)
        case = f"{entry['case']}, {entry['requests']} x {entry['prompt']}"
        table.add_row(case, *shown, f"{entry['step']['ratio']:.2f}", entry["layers"]["bound"])
    console.print(table)
