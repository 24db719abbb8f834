"""Does the simulator tell the truth? `python -m bench.simulate.accuracy --out FILE` (`make bench-simulator`).

In each round costs are taken from two real systems, one worker and two stages, each with 1 client and with 32. What the
simulator makes of them for six other systems and loads is written down, and only then these are run. A machine that has
neighbours is faster at one time than at another: so there are several rounds, and their means are compared. Everything
is on this host, each worker has one thread, Redis writes to the disk before every answer. Figures are never asserted.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.compare import block_folder
from bench.simulate.configurations import MANY, Configuration, closed, known, six
from bench.simulate.costs import Costs
from bench.simulate.load import Figures, mean
from bench.simulate.measured.alone import read_stream_cost
from bench.simulate.measured.counting import Counted, measured
from bench.simulate.measured.driving import running
from bench.simulate.measured.taking import sizes, taken
from bench.simulate.system import Setup, simulate
from blockrelay.block_folder.folder import open_block_folder

SIMULATED_S, SIMULATIONS, WARM_UP_S = 20.0, 3, 3.0
FIGURES = ("tokens_per_second", "first_token_s", "between_tokens_s")


def predicted(configuration: Configuration, costs: Costs) -> Figures:
    """The mean of several simulations."""
    return mean([
        simulate(configuration.setup, configuration.load, costs, seconds=SIMULATED_S, warm_up=WARM_UP_S, seed=seed)
        .figures
        for seed in range(SIMULATIONS)
    ])  # fmt: skip


def run(configuration: Configuration, model: Path, seconds: float) -> Counted:
    """Measured."""
    setup, vocabulary = configuration.setup, open_block_folder(model, blocks=[]).model.vocab_size
    with running(model, stages=setup.stages, replicas=setup.workers // setup.stages) as system:
        return measured(system, configuration.load, seconds, vocabulary)


def row(name: str, said: Figures, found: Figures, others: float) -> str:
    """One line of the table: predicted, measured and the error of each figure, in tokens/s and milliseconds; and how
    many cores somebody else had meanwhile, with which no error says anything."""
    cells = [f"{name:26}"]
    for figure in FIGURES:
        scale = 1 if figure == "tokens_per_second" else 1000
        says, finds = getattr(said, figure) * scale, getattr(found, figure) * scale
        cells.append(f"{says:8.1f} {finds:8.1f} {100 * (says / finds - 1):+6.1f} %")
    return " | ".join([*cells, f"{others:6.2f}"])


def one_round(model: Path, seconds: float, out: Path, rounds: list[dict[str, Any]]) -> Sequence[Counted]:
    """Another entry of `rounds`, written to the file before any of the six is measured, and behind each. What was
    counted of the known ones."""
    costs, counted = taken(model, seconds)
    capacity = predicted(Configuration("", Setup(), closed(MANY)), costs).tokens_per_second
    configurations = six(capacity)
    said = {one.name: predicted(one, costs) for one in configurations}
    this: dict[str, Any] = {
        "costs": costs.encode(),
        "counted": [asdict(one) for one in counted],
        "predicted": {name: asdict(figures) for name, figures in said.items()},
        "measured": {},
    }
    rounds.append(this)
    out.write_text(json.dumps({"rounds": rounds}, indent=1))
    for one, found in zip([one for system in known() for one in system], counted, strict=True):
        print(row(f"{one.name} (known)", predicted(one, costs), found.figures, found.others), flush=True)
    for one in configurations:
        found = run(one, model, seconds)
        print(row(one.name, said[one.name], found.figures, found.others), flush=True)
        this["measured"][one.name] = asdict(found)
        out.write_text(json.dumps({"rounds": rounds}, indent=1))
    return counted


def means(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was predicted and measured of each of the six, over all rounds; costs are the last round's."""
    names: list[str] = list(rounds[0]["measured"])
    of = {
        name: (
            mean([Figures(**each["predicted"][name]) for each in rounds]),
            mean([Figures(**each["measured"][name]["figures"]) for each in rounds]),
            fmean(each["measured"][name]["others"] for each in rounds),
        )
        for name in names
    }
    return {
        "costs": rounds[-1]["costs"],
        "predicted": {name: asdict(said) for name, (said, _, _) in of.items()},
        "measured": {name: {"figures": asdict(found), "others": others} for name, (_, found, others) in of.items()},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".bench/simulate.json"), help="costs, predicted, measured")
    parser.add_argument("--shape", default="llama75m", help="of a checkpoint of random weights (bench/checkpoint.py)")
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    model = block_folder(chosen.shape, "w8a8").absolute()
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    heads = (f"{head:>26}" for head in ("tokens/s", "first token, ms", "between tokens, ms"))
    print(" | ".join(["predicted, measured, error", *heads, "others"]))
    rounds: list[dict[str, Any]] = []
    counted: Sequence[Counted] = ()
    for _ in range(chosen.rounds):
        counted = one_round(model, chosen.seconds, chosen.out, rounds)
    written = means(rounds) | {"footprint": asdict(sizes(model, counted, read_stream_cost())), "rounds": rounds}
    chosen.out.write_text(json.dumps(written, indent=1))
    print(f"means of {chosen.rounds} rounds")
    for name, found in written["measured"].items():
        print(row(name, Figures(**written["predicted"][name]), Figures(**found["figures"]), found["others"]))
    for figure in FIGURES:
        errors = [
            abs(written["predicted"][n][figure] / found["figures"][figure] - 1)
            for n, found in written["measured"].items()
        ]
        print(f"{figure}: errors up to {max(errors):.1%}; {sum(e <= 0.1 for e in errors)} of {len(errors)} within 10 %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
