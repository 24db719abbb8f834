"""Writes the tables of one million streams in docs/cells.md: `python -m bench.simulate.million [--costs FILE]`.

FILE is the output of `python -m bench.simulate.accuracy`, and is copied to docs/one-million-streams.json. Without FILE
the tables are written again from that copy. Only text between the page's marks changes.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.simulate.costs import Costs
from bench.simulate.load import Figures
from bench.simulate.sizing import ROUND_S, SHARE, Footprint, Machine, Model, Sized, Target, size

DOCS = Path(__file__).parents[2] / "docs"
PAGE, DATA = DOCS / "cells.md", DOCS / "one-million-streams.json"

TARGET = Target(streams=1_000_000, tokens_per_s=10, prompt=500, new=500)
#: The share of the published peak speeds that is assumed to be reached.
REACHED = 0.5
#: Machines with their published peak speeds.
PEAKS = (
    Machine(name="H200", bytes_per_s=4.8e12, operations_per_s=990e12, memory=141e9, slots=512),
    Machine(name="CPU server", bytes_per_s=0.92e12, operations_per_s=50e12, memory=384e9, slots=64),
)
#: The shape of Llama 3.1 8B: 16 bits a weight on the GPU, 8 on the CPU; keys and values of 16 bits.
KV_BYTES = 2 * 32 * 8 * 128 * 2
MODELS = {
    "H200": Model(parameters=8.0e9, weight_bytes=16e9, kv_bytes=KV_BYTES),
    "CPU server": Model(parameters=8.0e9, weight_bytes=8e9, kv_bytes=KV_BYTES),
}
#: Bytes that a control Redis may fill: half of its 8 GiB, beyond which the script FORGET deletes ended requests.
REDIS_MEMORY = 4 * 1024**3
#: Cores of the hosts for gateways, Redis and schedulers, and assumed dollars per hour of each kind of machine.
CORES, DOLLARS = 64, {"H200": 3.5, "CPU server": 4.0, "host": 2.5}
#: Changes to the costs, with a factor for each changed field.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "reading logs costs nothing for each stream": {"read_stream": 0.0, "gateway_read_stream": 0.0},
    "half of it for each token, in Redis and gateways": {"commit_token": 0.5, "gateway_token": 0.5},
}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sized(costs: Costs, footprint: Footprint) -> dict[str, Sized]:
    """Returns the sizes of the system for TARGET, by kind of worker."""

    def reached(peak: Machine) -> Machine:
        speed = {"bytes_per_s": peak.bytes_per_s * REACHED, "operations_per_s": peak.operations_per_s * REACHED}
        return replace(peak, **speed)

    return {
        peak.name: size(costs, footprint, TARGET, MODELS[peak.name], reached(peak), redis_memory=REDIS_MEMORY)
        for peak in PEAKS
    }


def hosts(found: Sized) -> float:
    """Returns the hosts that are needed: one core for each gateway, and two cores for the other services of a cell."""
    return (found.gateways + 2 * found.cells) / (SHARE * CORES)


def need(found: Mapping[str, Sized]) -> str:
    """Returns the table of the machines that are needed."""
    lines: list[tuple[str, list[str]]] = [
        ("streams of a worker, bound by", [f"{s.workers.streams}, {s.workers.bound}" for s in found.values()]),
        ("a step, ms", [f"{1000 * s.workers.step_s:.0f}" for s in found.values()]),
        ("**workers**", [f"**{s.workers.count:,}**" for s in found.values()]),
        ("streams of a cell; most is for", [f"{s.cell_streams:,}, {s.cell_use.largest}" for s in found.values()]),
        ("**cells (Redis shards)**", [f"**{s.cells:,}**" for s in found.values()]),
        ("streams of a gateway; most is for", [f"{s.gateway_streams:,}, {s.gateway_bound}" for s in found.values()]),
        ("**gateways, a core each**", [f"**{s.gateways:,}**" for s in found.values()]),
        (f"hosts of {CORES} cores for gateways and cells", [f"{hosts(s):,.0f}" for s in found.values()]),
        ("cells that one gateway could read, without a stream", [f"{s.gateway_cells}" for s in found.values()]),
        ("memory of gateways, GB", [f"{s.gateway_bytes / 1e9:,.0f}" for s in found.values()]),
        ("memory of all control Redis, GB", [f"{s.redis_bytes / 1e9:,.0f}" for s in found.values()]),
        ("to clients, GB/s", [f"{s.client_bytes_per_s / 1e9:,.1f}" for s in found.values()]),
        ("to and from control Redis, GB/s", [f"{s.redis_bytes_per_s / 1e9:,.1f}" for s in found.values()]),
    ]  # fmt: skip
    return table(["", *found], [[name, *cells] for name, cells in lines])


def redis_use(found: Mapping[str, Sized]) -> str:
    """Returns the table of the use of a full cell's control Redis."""
    names = {
        "tokens": "tokens into logs", "commits": "calls of COMMIT", "requests": "ACCEPT, CLAIM, ends",
        "reads": "reads of gateways", "syncs": "the disk", "memory": "its memory, beside",
    }  # fmt: skip
    uses = [asdict(s.cell_use) for s in found.values()]
    return table(
        ["share", *found], [[name, *(f"{100 * use[key]:.0f} %" for use in uses)] for key, name in names.items()]
    )


def drivers(found: Mapping[str, Sized]) -> str:
    """Returns the table of dollars per hour, by part of the system."""
    lines = {
        "workers": [s.workers.count * DOLLARS[name] for name, s in found.items()],
        "gateways": [hosts(replace(s, cells=0)) * DOLLARS["host"] for s in found.values()],
        "cells": [hosts(replace(s, gateways=0)) * DOLLARS["host"] for s in found.values()],
    }
    totals = [sum(column) for column in zip(*lines.values(), strict=True)]
    rows = [
        [name, *(f"{value:,.0f} ({100 * value / total:.1f} %)" for value, total in zip(values, totals, strict=True))]
        for name, values in lines.items()
    ]
    return table(["dollars an hour (share)", *found], [*rows, ["together", *(f"{total:,.0f}" for total in totals)]])


def changes(costs: Costs, footprint: Footprint) -> str:
    """Returns the table of the sizes after each change of the costs."""
    rows: list[list[str]] = []
    for name, factors in CHANGES.items():
        changed: dict[str, Any] = {field: getattr(costs, field) * factor for field, factor in factors.items()}
        one = sized(replace(costs, **changed), footprint)["H200"]
        cell = f"{one.cell_streams:,}, {one.cell_use.largest}"
        gateway = f"{one.gateway_streams:,}, {one.gateway_bound}"
        rows.append([name, cell, f"{one.cells:,}", gateway, f"{one.gateways:,}"])
    return table(["with H200", "streams of a cell", "cells", "streams of a gateway", "gateways"], rows)


def costs_table(costs: Costs, footprint: Footprint) -> str:
    """Returns the table of the measured costs that matter most."""
    micro = {
        "Redis: a token into its log": costs.commit_token,
        "Redis: a call of COMMIT": costs.call + costs.commit,
        "Redis: one request more (ACCEPT, CLAIM, its end)": 4 * costs.call + costs.accept + costs.claim
        + costs.claim_job + costs.wake + costs.commit_end,
        "Redis: a log that a read asks about": costs.read_stream,
        "its disk: a sync": costs.sync + costs.fsync[0],
        "gateway: a request": costs.gateway_request,
        "gateway: a token": costs.gateway_token,
        "gateway: an answer of Redis": costs.gateway_read,
        "gateway: a log that it asks about": costs.gateway_read_stream,
    }  # fmt: skip
    sizes = {
        "Redis: a request under way": footprint.redis_request,
        "Redis: one that has ended": footprint.redis_ended,
        "gateway: a stream": footprint.gateway_stream,
        "on the wire to a client: a token": footprint.client_token,
        "on the wires of Redis: a token": footprint.redis_token,
        "on the wires of Redis: a log that a read asks about": footprint.redis_read_stream,
    }
    rows = [[name, f"{1e6 * seconds:,.1f} µs"] for name, seconds in micro.items()]
    return table(["", "measured"], [*rows, *([name, f"{size:,.0f} bytes"] for name, size in sizes.items())])


def accuracy(data: Mapping[str, Any]) -> str:
    """Returns the table of the predictions, the measurements and the errors."""
    rows: list[list[str]] = []
    for name, measured in data["measured"].items():
        prediction, cells = Figures(**data["predicted"][name]), [name]
        for figure, scale in (("tokens_per_second", 1), ("first_token_s", 1000), ("between_tokens_s", 1000)):
            expected, actual = getattr(prediction, figure) * scale, measured["figures"][figure] * scale
            cells.append(f"{expected:,.1f} / {actual:,.1f} ({100 * (expected / actual - 1):+.0f} %)")
        rows.append([*cells, f"{measured['others']:.2f}"])
    heads = ["predicted / measured (error)", "tokens/s", "first token, ms", "between tokens, ms", "cores of others"]
    return table(heads, rows)


def parts(data: Mapping[str, Any]) -> dict[str, str]:
    """Returns the text between the marks of the page, by the marks' names."""
    costs, footprint = Costs.decode(data["costs"]), Footprint(**data["footprint"])
    found = sized(costs, footprint)
    return {
        "target": f"{TARGET.streams:,} streams, {TARGET.tokens_per_s:g} tokens a second each, prompts of "
        f"{TARGET.prompt} and answers of {TARGET.new} tokens: {TARGET.streams * TARGET.tokens_per_s:,.0f} tokens and "
        f"{TARGET.streams * TARGET.requests_per_s:,.0f} requests a second. "
        f"Everything is filled to {100 * SHARE:.0f} %, and reads and syncs take turns of {1000 * ROUND_S:.0f} ms.",
        "need": need(found),
        "redis": redis_use(found),
        "drivers": drivers(found),
        "changes": changes(costs, footprint),
        "costs": costs_table(costs, footprint),
        "accuracy": accuracy(data),
    }


def written(page: str, texts: Mapping[str, str]) -> str:
    """Returns the page with these texts between its marks."""
    for name, text in texts.items():
        mark = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert mark.search(page), f"the page has no mark {name}"
        page = mark.sub(lambda match, text=text: f"{match.group(1)}\n{text}\n\n{match.group(2)}", page)
    return page


def main(arguments: list[str] | None = None) -> int:
    """Writes the page and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, help="output of bench.simulate.accuracy; default: the copy in docs/")
    chosen = parser.parse_args(arguments)
    if chosen.costs:
        new = json.loads(chosen.costs.read_text())
        kept = {name: new[name] for name in ("costs", "footprint", "predicted", "measured")}
        DATA.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), parts(json.loads(DATA.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
