"""Does the simulator tell the truth? `python -m bench.simulate.accuracy --out FILE` (`make bench-simulator`).

Costs are taken from two real systems: one worker with 1 client and with 16, and two stages with 1 client. What the
simulator makes of them for six other systems and loads is written down, and only then these are run. Everything is on
this host, each worker has one thread, Redis writes to the disk before every answer. Figures are never asserted.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.compare import block_folder
from bench.simulate.costs import Costs
from bench.simulate.load import Figures, Lengths, Load
from bench.simulate.measured.alone import beside, read_stream_cost, speeds, sync_cost, wake_wait
from bench.simulate.measured.blocks import block_costs, neighbour_ratios
from bench.simulate.measured.counting import Counted, footprint, measured
from bench.simulate.measured.driving import System, running
from bench.simulate.measured.fitting import Alone, fitted
from bench.simulate.measured.hops import hop_costs
from bench.simulate.sizing import Footprint
from bench.simulate.system import Setup, simulate
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.host.cpu import cores
from blockrelay_worker.scheduling.micro_batches import Seat, groups_of

#: Drawn: requests of one length that begin together end together, for ever, and what is seen is how they began.
PROMPT, NEW, LONG_PROMPT = Lengths(16, 48), Lengths(32, 96), Lengths(192, 320)
#: Answers of the loads that costs are taken from: a request's part tells from a token's.
SHORT, LONG = Lengths(2, 6), Lengths(64, 128)
#: Of the capacity, where requests come at random.
BUSY = 0.6
SIMULATED_S, SIMULATED_WARM_UP_S, IDLE_S = 20.0, 3.0, 2.0
FIGURES = ("tokens_per_second", "first_token_s", "between_tokens_s")


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is predicted, then measured."""

    name: str
    setup: Setup
    load: Load


def closed(clients: int, prompt: Lengths = PROMPT, new: Lengths = NEW) -> Load:
    return Load(prompt=prompt, new=new, clients=clients)


def staged() -> Setup:
    """Two stages on this host."""
    return Setup(workers=2, stages=2, groups=groups_of([Seat("here", cores(), 1)] * 2))


def configurations(capacity: float) -> list[Configuration]:
    """The six, where one worker gives `capacity` tokens a second."""
    one = Setup()
    random = Load(prompt=PROMPT, new=NEW, per_second=BUSY * capacity / NEW.mean)
    return [
        Configuration("4 clients", one, closed(4)),
        Configuration("32 clients", one, closed(32)),
        Configuration("8 clients, long prompts", one, closed(8, LONG_PROMPT)),
        Configuration("random arrivals, 60 %", one, random),
        Configuration("2 workers, 16 clients", Setup(workers=2), closed(16)),
        Configuration("2 stages, 8 clients", staged(), closed(8)),
    ]


def taken(model: Path, seconds: float) -> tuple[Costs, Footprint, list[Counted]]:
    """Costs and sizes, from one worker with 1 client and with 16, from two stages with 1, and what is measured
    alone."""
    folder = open_block_folder(model)
    shape, blocks = folder.model, block_costs(folder)
    reads, syncs = read_stream_cost(), beside(cores(), sync_cost)
    counted: list[Counted] = []
    with running(model) as system:
        idle = _idle(system)
        for clients in (1, 16):
            for new in (SHORT, LONG):
                load = closed(clients, new=new)
                counted.append(measured(system, load, seconds / 2, shape.vocab_size, scripts=True))
    with running(model, stages=2) as system:
        counted.append(measured(system, closed(1, new=LONG), seconds / 2, shape.vocab_size, scripts=True))
    with running(model) as system:
        under_way, ended, stream = footprint(system, shape.vocab_size)
    alone = Alone(
        blocks=blocks,
        hop=hop_costs(shape.hidden_size),
        sync=syncs[0][0],
        fsync=tuple(wait for _, wait in syncs),
        wire=beside(cores(), wake_wait),
        speeds=speeds(cores()),
        neighbour=neighbour_ratios(model) if cores() > 1 else {},
        read_stream=reads.redis,
        gateway_read_stream=reads.gateway,
        idle=idle,
    )
    last = counted[-2]
    size = Footprint(
        redis_request=under_way,
        redis_ended=ended,
        redis_token=(last.redis_bytes - last.reads * last.clients * reads.wire_bytes) / last.tokens,
        redis_read_stream=reads.wire_bytes,
        gateway_stream=stream,
        client_token=last.client_bytes / last.tokens,
    )
    return fitted(counted[:-1], counted[-1], alone), size, counted


def _idle(system: System) -> Mapping[str, float]:
    """Seconds of CPU per second without requests."""
    before = system.cpu_s()
    time.sleep(IDLE_S)
    return {kind: (spent - before[kind]) / IDLE_S for kind, spent in system.cpu_s().items()}


def predicted(configuration: Configuration, costs: Costs) -> Figures:
    return simulate(
        configuration.setup, configuration.load, costs, seconds=SIMULATED_S, warm_up=SIMULATED_WARM_UP_S
    ).figures


def run(configuration: Configuration, model: Path, seconds: float) -> Counted:
    """Measured."""
    setup, vocabulary = configuration.setup, open_block_folder(model, blocks=[]).model.vocab_size
    with running(model, stages=setup.stages, replicas=setup.workers // setup.stages) as system:
        return measured(system, configuration.load, seconds, vocabulary)


def row(name: str, said: Figures, counted: Counted) -> str:
    """One line of the table: predicted, measured and the error of each figure, in tokens/s and milliseconds; and how
    many cores somebody else had meanwhile, with which no error says anything."""
    found = counted.figures
    cells = [f"{name:26}"]
    for figure in FIGURES:
        scale = 1 if figure == "tokens_per_second" else 1000
        says, finds = getattr(said, figure) * scale, getattr(found, figure) * scale
        cells.append(f"{says:8.1f} {finds:8.1f} {100 * (says / finds - 1):+6.1f} %")
    return " | ".join([*cells, f"{counted.others:6.2f}"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".bench/simulate.json"), help="costs, predicted, measured")
    parser.add_argument("--shape", default="llama75m", help="of a checkpoint of random weights (bench/checkpoint.py)")
    parser.add_argument("--seconds", type=float, default=20, help="of each measurement")
    chosen = parser.parse_args(arguments)
    model = block_folder(chosen.shape, "w8a8").absolute()
    costs, size, counted = taken(model, chosen.seconds)
    capacity = predicted(Configuration("", Setup(), closed(32)), costs).tokens_per_second
    known = [
        Configuration(f"{c} clients (known)", Setup(), closed(c, new=new)) for c in (1, 16) for new in (SHORT, LONG)
    ]
    known.append(Configuration("2 stages, 1 client (known)", staged(), closed(1, new=LONG)))
    six = configurations(capacity)
    written: dict[str, Any] = {
        "costs": costs.encode(),
        "footprint": asdict(size),
        "counted": [asdict(one) for one in counted],
        "predicted": {one.name: asdict(predicted(one, costs)) for one in six},
        "measured": {},
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(written, indent=1))  # before any of the six is measured
    heads = (f"{head:>26}" for head in ("tokens/s", "first token, ms", "between tokens, ms"))
    print(" | ".join(["predicted, measured, error", *heads, "others"]))
    for one, found in zip(known, counted, strict=True):
        print(row(one.name, predicted(one, costs), found), flush=True)
    for one in six:
        found = run(one, model, chosen.seconds)
        print(row(one.name, Figures(**written["predicted"][one.name]), found), flush=True)
        written["measured"][one.name] = asdict(found)
        chosen.out.write_text(json.dumps(written, indent=1))
    for figure in FIGURES:
        errors = [
            abs(written["predicted"][n][figure] / found["figures"][figure] - 1)
            for n, found in written["measured"].items()
        ]
        print(f"{figure}: errors up to {max(errors):.1%}; {sum(e <= 0.1 for e in errors)} of {len(errors)} within 10 %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
