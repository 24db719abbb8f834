"""docs/sizing.md: what models and loads need, by the functions that `blockrelay analyse --sizing` has."""

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from math import ceil

from blockrelay.block_folder.analysis import ModelAnalysis, analyse
from blockrelay.block_folder.model import Precision
from blockrelay.quantities import format_quantity, format_seconds
from blockrelay_converter.analyse import run
from blockrelay_converter.policy import PLANNED_SHARE as SHARE
from blockrelay_converter.sizing import measured
from blockrelay_converter.sizing.capacity import (
    FIRST_TOKEN_SYNCS,
    SYNCS_A_WRITE,
    Capacity,
    ExpectedLoad,
    ModelNeed,
    disk_effect,
    model_need,
)
from blockrelay_converter.sizing.command import NEW, PROMPT
from blockrelay_converter.sizing.measured import SOURCES, Cost, Measured
from blockrelay_converter.sizing.pace import given_pace
from blockrelay_converter.sizing.shapes import SHAPES
from blockrelay_converter.sizing.sized import size
from docs.generate.tables import table

_PRECISIONS: Sequence[Precision] = ("w4a8", "w8a8", "fp16", "fp32")
_CONTEXTS = (4096, 32_768, 131_072)
#: Of the network between stages.
_STAGES = (2, 4, 8)
#: Requests a second of the tables by load, and tokens a second of each worker there.
_RATES, _PACE = (1.0, 20.0, 100.0, 1000.0), 1000.0
_DISKS: Mapping[str, float] = {
    "a local NVMe that keeps what it has without power": 0.0001,
    "a local SSD": 0.001,
    "a network disk of a cloud": 0.005,
    "a rotating disk": 0.02,
}
EXAMPLE = ("8b", "--sizing", "--precision", "w8a8", "--context", "32768", "--requests-per-second", "20")

_HEAD = """\
# Sizing

For operators who choose machines: what a model and a load need.

`blockrelay analyse --sizing` prints it for yours; the tables here are made by the same functions.

MODEL is a block folder, a folder with a `config.json` of Hugging Face (no weights are needed), or a shape: `1b` (Llama
3.2 1B), `8b` (Llama 3.1 8B) or `70b` (Llama 3.1 70B). `--prompt` and `--new` are the tokens of one request, `--context`
is what a request may have at most, `--stages` the parts that the model is cut into. How fast a worker is depends on
your machines: `--profile profiling_results.json` takes it from what [`blockrelay profile`](plans.md#profiles) measured,
and `--tokens-per-second-per-worker` from what [`blockrelay bench`](performance.md) did. Without either the command says
**not profiled** and gives a range.
"""
_READ = """
The last column names [what a figure rests on](#what-each-figure-rests-on). Read it so: the model fits into workers of
16 GB and needs no stages. How many such workers there must be is the one thing that this page cannot know; all else is
small: two gateways, two schedulers, one Redis with 1 GiB on any disk with syncs of a few milliseconds. With requests
that fill the 32k, the KV of each takes 4.29 GB: then it is the pages that say how many a worker has at once.
"""
_RULES = f"""
## How it is computed

- **Weights** are the bytes of a converted folder. A CPU widens `fp16` to float32 when it loads it; the table has the
  file.
- **KV**: two numbers for each dimension of a head of keys in each layer, 16 bits (32 where all blocks are `fp32`), in
  pages of 16 tokens. There is no other precision of KV. A worker has `BLOCKRELAY_MAX_REQUESTS` (64) requests at once;
  give it their pages with `BLOCKRELAY_KV_BYTES`, for the default is a fifth of the memory that is free when it starts.
  Too few pages are no error: requests wait, or give theirs back and run again.
- **Beside them** a CPU worker has its process. Files of weights are mapped: what of them lies in the page cache can be
  taken back, but while a worker loads it is there twice. With AMX it keeps up to two more copies where memory is left
  over. Shared KV pages take 1 GiB of `/dev/shm` on a host (`BLOCKRELAY_PAGE_STORE_BYTES`).
- **Workers** are busy for {100 * SHARE:.0f} % of their time, and have `--requests-at-once`. One more of each stage is
  the spare with which the death of a worker costs no wait.
- **Control Redis**: so much for each request, token, COMMIT and second. A COMMIT has the tokens that one step of a
  worker gave. Requests are kept for 900 s after their end; when half of `maxmemory` is full, the oldest are forgotten
  early. A cell has one Redis, whose one thread is filled to {100 * SHARE:.0f} %.
- **Disk**: with `appendfsync always` Redis writes what has come, syncs, and answers; what comes meanwhile shares the
  next sync. So **no disk bounds how many requests are accepted**, but how long each waits. A first token waits for
  {FIRST_TOKEN_SYNCS} writes (ACCEPT, CLAIM, COMMIT), {SYNCS_A_WRITE} syncs each, as one may be under way.
  A worker has one COMMIT under way: where {SYNCS_A_WRITE} syncs take longer than a step, the tokens of several steps
  come together.
- **Rows between stages**: hidden_size numbers of 32 bits for each token of a prompt and each new token, from each stage
  to the next. On one host they go through shared memory; else into the payload Redis and out of it, so that its network
  carries them twice.
- **Gateways** have a core each, and at least two are there. Helpers that read large bodies take memory only then.
"""
_WATCH: Sequence[tuple[str, str, str]] = (
    ("workers", "`blockrelay_workers_wanted`, `blockrelay_backlog_seconds`",
     "more are wanted than are there, the backlog grows"),
    ("pace of a worker", "`blockrelay_worker_generation_tokens_total`",
     "a busy one gives fewer a second than was assumed"),
    ("KV pages", "`blockrelay_worker_kv_cache_usage_ratio`, `blockrelay_worker_num_preemptions_total`",
     "near 1, and runs give back their pages"),
    ("requests at once", "`blockrelay_requests_in_flight`, `blockrelay_worker_num_requests_running`",
     "workers have as many as they may while others wait"),
    ("fsync", "`blockrelay_worker_commit_seconds`", "a COMMIT takes longer than a step"),
    ("first token", "`blockrelay_time_to_first_token_seconds`, `blockrelay_worker_request_queue_time_seconds`",
     "it grows and workers are idle"),
    ("Redis' memory", "`blockrelay_ended_requests_forgotten_total`, and `used_memory` beside `maxmemory`",
     "requests are forgotten early"),
    ("Redis' thread", "CPU of its process", "above 0.7 cores: [another cell](cells.md)"),
    ("rows between stages", "`blockrelay_worker_forwarded_bytes_total` by `way`", "near what the network carries"),
    ("gateways", "CPU of each, `blockrelay_gateway_requests_running`", "above 0.7 cores: one more"),
)  # fmt: skip
_COSTS: Sequence[tuple[str, Cost, str]] = (
    ("Redis: commands, those of scripts counted", measured.REDIS_COMMANDS, ""),
    ("Redis: CPU", measured.REDIS_CPU, "s"),
    ("Redis: bytes on its wires", measured.REDIS_WIRE, "B"),
    ("Redis: memory, under way", measured.UNDER_WAY_BYTES, "B"),
    ("Redis: memory, ended and kept", measured.ENDED_BYTES, "B"),
    ("disk: bytes of the append-only file", measured.FILE_BYTES, "B"),
    ("disk: bytes written", measured.DEVICE_BYTES, "B"),
    ("disk: syncs, none of them shared", measured.SYNCS, ""),
    ("gateway: CPU", measured.GATEWAY_CPU, "s"),
)
_SINGLE: Sequence[tuple[str, Measured, str]] = (
    ("gateway: CPU of a read of all its logs in a cell", measured.GATEWAY_READ_S, "s"),
    ("gateway: memory of an open stream", measured.GATEWAY_STREAM_BYTES, "B"),
    ("gateway: memory alone", measured.GATEWAY_ALONE_BYTES, "B"),
    ("gateway: memory of its helpers, once bodies were large", measured.GATEWAY_HELPERS_BYTES, "B"),
    ("gateway: a token on the wire to its client", measured.CLIENT_TOKEN_BYTES, "B"),
    ("Redis: memory alone", measured.REDIS_ALONE_BYTES, "B"),
    ("scheduler: memory", measured.SCHEDULER_BYTES, "B"),
    ("worker: memory beside weights and KV", measured.WORKER_ALONE_BYTES, "B"),
    ("worker: operations of a core in a second, `w8a8`", measured.CORE_OPERATIONS, ""),
)
_FOOT = """
[Metrics](metrics.md) has them all, [autoscaling](operations.md#autoscaling) what adds workers by itself, and
[one million streams](cells.md#one-million-streams) what comes first when a system grows beyond this page.
"""


def page() -> str:
    """The whole page."""
    return "".join(
        (_HEAD, _example(), "\n## Weights\n\n", _weights(), "\n## Keys and values\n\n", _keys_and_values(),
         "\n## Memory of a worker\n\n", _memory(), "\n## Control Redis, its disk, gateways\n\n", _by_rate(),
         "\n## Which disk\n\n", _disks(), "\n## Network between stages\n\n", _network(), _RULES,
         _costs(), _sources(), _watch(), _FOOT)
    )  # fmt: skip


def _example() -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = run(list(EXAMPLE))
    assert code == 0, f"{EXAMPLE} ended with {code}"
    figures = printed.getvalue().partition("\nshape: ")[0]
    said = (
        "What do I need for Llama 8B in `w8a8` with a context of 32k, at 20 requests a second? In a checkout\n"
        "`. .venv/bin/activate` puts `blockrelay` on the path, once for each shell."
    )
    command = " ".join(("blockrelay analyse", *EXAMPLE))
    return f"\n## An example\n\n{said}\n\n```sh\n{command}\n```\n\n```text\n{figures}\n```\n{_READ}"


def _analyses() -> dict[str, ModelAnalysis]:
    return {name: analyse(shape) for name, shape in SHAPES.items()}


def _need(name: str, analysis: ModelAnalysis, precision: Precision, load: ExpectedLoad) -> ModelNeed:
    precisions = (precision,) * len(analysis.blocks)
    return model_need(analysis, precisions, load, head_dim=SHAPES[name].head_dim)


def _load(context: int, **fields: int) -> ExpectedLoad:
    return ExpectedLoad(**{"requests_per_second": 1, "prompt": PROMPT, "new": NEW, "context": context, **fields})


def _bytes(count: float) -> str:
    return format_quantity(count, "B")


def _weights() -> str:
    load = _load(_CONTEXTS[0])
    rows = [
        [SHAPES[name].name, *(_bytes(_need(name, one, p, load).weight_bytes) for p in _PRECISIONS)]
        for name, one in _analyses().items()
    ]
    return table(["model", *(f"`{p}`" for p in _PRECISIONS)], rows)


def _keys_and_values() -> str:
    kinds: Sequence[tuple[Precision, str]] = (("w8a8", "16 bits"), ("fp32", "32 bits (all blocks `fp32`)"))
    rows: list[list[str]] = []
    for name, one in _analyses().items():
        for precision, said in kinds:
            needs = [_need(name, one, precision, _load(context)) for context in _CONTEXTS]
            full = [_bytes(need.kv_bytes_per_context) for need in needs]
            rows.append([SHAPES[name].name, said, _bytes(needs[0].kv_bytes_per_token), *full])
    return table(["model", "KV", "a token", *(f"a request of {c:,}" for c in _CONTEXTS)], rows)


def _memory() -> str:
    """One stage; of requests of the default load, and of those that fill a context."""
    asked = [("64 of 768 tokens", _load(4096, at_once=64))]
    asked += [(f"{n} of {c:,}", _load(c, prompt=c - NEW, at_once=n)) for c in _CONTEXTS[:2] for n in (1, 16)]
    asked += [("1 of 131,072", _load(131_072, prompt=131_072 - NEW, at_once=1))]
    rows: list[list[str]] = []
    for name, one in _analyses().items():
        for precision in _PRECISIONS:
            cells = [_bytes(_need(name, one, precision, load).stages[0].cpu_memory) for _, load in asked]
            rows.append([SHAPES[name].name, f"`{precision}`", *cells])
    text = (
        "A CPU worker of one stage: weights, KV of so many requests at once, its process. A GPU needs 0.3 GB less,\n"
        "and with `fp16` half of the weights. With stages each takes its share of weights and of KV.\n\n"
    )
    return text + table(["model", "precision", *(said for said, _ in asked)], rows)


def _capacity(rate: float) -> Capacity:
    load = ExpectedLoad(requests_per_second=rate, prompt=PROMPT, new=NEW, context=4096)
    shape = SHAPES["8b"]
    return size(shape, ("w8a8",) * shape.blocks, load, lambda _: given_pace(_PACE)).slow


def _by_rate() -> str:
    found = [_capacity(rate) for rate in _RATES]
    rows = [
        ["new tokens a second", *(format_quantity(rate * NEW) for rate in _RATES)],
        ["requests at once", *(f"{ceil(c.requests_at_once):,}" for c in found)],
        ["cells", *(str(c.cells) for c in found)],
        ["Redis: commands a second", *(format_quantity(c.redis_commands_per_second) for c in found)],
        ["Redis: cores", *(f"{c.redis_cpu:.2g}" for c in found)],
        ["Redis: memory in use", *(_bytes(c.redis_bytes) for c in found)],
        ["Redis: network, a second", *(_bytes(c.redis_wire_bytes_per_second) for c in found)],
        ["disk: appended, a second", *(_bytes(c.disk.file_bytes_per_second) for c in found)],
        ["disk: written, a second", *(_bytes(c.disk.device_bytes_per_second) for c in found)],
        ["disk: syncs a second, at most", *(format_quantity(c.disk.syncs_per_second) for c in found)],
        ["gateways", *(str(c.gateways) for c in found)],
        ["gateways: cores of all", *(f"{c.gateway_cpu:.2g}" for c in found)],
        ["gateways: memory of each", *(_bytes(c.gateway_bytes) for c in found)],
        ["to clients, a second", *(_bytes(c.client_bytes_per_second) for c in found)],
    ]
    text = (
        f"They do not depend on the model, but on requests and tokens: prompts of {PROMPT} and answers of {NEW}\n"
        f"tokens, workers of {_PACE:,.0f} new tokens a second. What is of Redis is of all cells together.\n\n"
    )
    return text + table(["requests a second", *(f"{rate:,.0f}" for rate in _RATES)], rows)


def _disks() -> str:
    found = _capacity(20.0)
    rows: list[list[str]] = []
    for name, fsync_s in _DISKS.items():
        effect = disk_effect(found, fsync_s)
        rows.append(
            [name, format_seconds(fsync_s), format_quantity(effect.syncs_per_second), f"{effect.writes_a_sync:.1f}",
             format_seconds(effect.first_token_s), format_quantity(effect.commits_per_second_a_worker),
             f"{effect.steps_a_commit:.1f}"]
        )  # fmt: skip
    text = (
        f"At 20 requests a second, where a step takes {format_seconds(found.step_s)}. What yours does is seen in\n"
        "`blockrelay_worker_commit_seconds`; the slow ones count, for all who write wait for them.\n\n"
    )
    heads = ("disk", "fsync", "syncs a second, at most", "writes that share one", "first token waits, at most",
             "COMMITs of a worker a second, at most", "steps in a COMMIT")  # fmt: skip
    return text + table(heads, rows)


def _network() -> str:
    rows: list[list[str]] = []
    for name, one in _analyses().items():
        cells = [_need(name, one, "w8a8", _load(4096, stages=n)).hop_bytes_per_row for n in _STAGES]
        a_second = [format_quantity(20 * (PROMPT + NEW) * size, "B/s") for size in cells]
        rows.append([SHAPES[name].name, *(_bytes(size) for size in cells), *a_second])
    heads = [f"{n} stages: a token" for n in _STAGES] + [f"{n} stages: 20 requests/s" for n in _STAGES]
    text = (
        f"Each token of a prompt and each new one, in every precision; and 20 requests a second of {PROMPT}+{NEW}\n"
        "tokens, two thirds of it for prompts.\n\n"
    )
    return text + table(["model", *heads], rows)


def _sources() -> str:
    rows = [(f"`{name}`", said) for name, said in SOURCES.items()]
    return (
        "\n## What each figure rests on\n\n"
        "Every line of the command, and every figure of its `--json`, names one of these.\n\n"
        f"{table(('name', 'what it is'), rows)}\n"
        "Seconds of CPU are those of an idle machine. On the Xeon of `capacity`, while others used its cores too, the\n"
        "same requests and tokens took gateways and Redis 2.2 to 2.8 times as many: leave them cores of their own.\n"
        "`capacity` is a fit to six loads by least squares. Counts and bytes do not depend on how fast a machine is;\n"
        "the worst of the six is off by 1 % in bytes of the file, 11 % in commands, 13 % in bytes on the wire.\n"
    )


def _costs() -> str:
    rows: list[list[str]] = []
    for name, cost, unit in _COSTS:
        parts = (cost.request, cost.token, cost.prompt_token, cost.commit, cost.second)
        rows.append([name, *(_cost(part, unit) for part in parts), f"`{cost.source}`"])
    heads = ("of", "a request", "a new token", "a token of a prompt", "a COMMIT", "a second without any", "rests on")
    singles = [(name, _cost(one.value, unit), f"`{one.source}`") for name, one, unit in _SINGLE]
    return f"\n## What was measured\n\n{table(heads, rows)}\n{table(('of', 'each', 'rests on'), singles)}"


def _cost(value: float, unit: str) -> str:
    if not value:
        return "-"
    return (
        format_seconds(value)
        if unit == "s"
        else f"{value:.3g} {unit}".rstrip()
        if value < 100
        else format_quantity(value, unit)
    )


def _watch() -> str:
    return f"\n## What to watch once it runs\n\n{table(('figure', 'metric', 'it was too small when'), _WATCH)}"
