"""Measures how accurate the simulator is: `python -m bench.simulate.accuracy --out FILE` (`make bench-simulator`).

Each round measures costs on two real systems, one worker and two stages, each with 1 client and with 32. The
simulator's predictions for six other systems and loads are written down first, and then these are run. The speed of a
machine with other guests varies, so the means of several rounds are compared. Everything runs on this host, each worker
has one thread, and Redis writes to the disk before every answer. Figures are never asserted.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.models import block_folder
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
    """Returns the predicted figures: the mean of several simulations."""
    return mean([
        simulate(configuration.setup, configuration.load, costs, seconds=SIMULATED_S, warm_up=WARM_UP_S, seed=seed)
        .figures
        for seed in range(SIMULATIONS)
    ])  # fmt: skip


def run(configuration: Configuration, model: Path, seconds: float) -> Counted:
    """Starts a real system of this configuration and measures it under its load for `seconds`."""
    setup, vocabulary = configuration.setup, open_block_folder(model, blocks=[]).model.vocab_size
    with running(model, stages=setup.stages, replicas=setup.workers // setup.stages) as system:
        return measured(system, configuration.load, seconds, vocabulary)


def row(name: str, prediction: Figures, measurement: Figures, others: float) -> str:
    """Returns one line of the table: predicted, measured and error of each figure, in tokens/s and milliseconds.

    `others` are the cores that other programs and guests had meanwhile; where they are many, errors mean nothing.
    """
    cells = [f"{name:26}"]
    for figure in FIGURES:
        scale = 1 if figure == "tokens_per_second" else 1000
        expected, actual = getattr(prediction, figure) * scale, getattr(measurement, figure) * scale
        cells.append(f"{expected:8.1f} {actual:8.1f} {100 * (expected / actual - 1):+6.1f} %")
    return " | ".join([*cells, f"{others:6.2f}"])


def one_round(model: Path, seconds: float, out: Path, rounds: list[dict[str, Any]]) -> Sequence[Counted]:
    """Runs a round and appends it to `rounds`; returns the measurements of the known configurations.

    The file `out` is written before any of the six configurations is measured, and after each.
    """
    costs, counted = taken(model, seconds)
    capacity = predicted(Configuration("", Setup(), closed(MANY)), costs).tokens_per_second
    configurations = six(capacity)
    predictions = {one.name: predicted(one, costs) for one in configurations}
    this: dict[str, Any] = {
        "costs": costs.encode(),
        "counted": [asdict(one) for one in counted],
        "predicted": {name: asdict(figures) for name, figures in predictions.items()},
        "measured": {},
    }
    rounds.append(this)
    out.write_text(json.dumps({"rounds": rounds}, indent=1))
    for one, measurement in zip([one for system in known() for one in system], counted, strict=True):
        print(row(f"{one.name} (known)", predicted(one, costs), measurement.figures, measurement.others), flush=True)
    for one in configurations:
        measurement = run(one, model, seconds)
        print(row(one.name, predictions[one.name], measurement.figures, measurement.others), flush=True)
        this["measured"][one.name] = asdict(measurement)
        out.write_text(json.dumps({"rounds": rounds}, indent=1))
    return counted


def means(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the means of predictions and measurements of the six over all rounds, and the last round's costs."""
    names: list[str] = list(rounds[0]["measured"])
    by_name = {
        name: (
            mean([Figures(**each["predicted"][name]) for each in rounds]),
            mean([Figures(**each["measured"][name]["figures"]) for each in rounds]),
            fmean(each["measured"][name]["others"] for each in rounds),
        )
        for name in names
    }
    return {
        "costs": rounds[-1]["costs"],
        "predicted": {name: asdict(prediction) for name, (prediction, _, _) in by_name.items()},
        "measured": {
            name: {"figures": asdict(measurement), "others": others}
            for name, (_, measurement, others) in by_name.items()
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs all rounds, prints their tables, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path(".bench/simulate.json"), help="file for costs, predictions and measurements"
    )
    parser.add_argument("--shape", default="llama75m", help="shape of the model, with random weights: llama75m, ...")
    parser.add_argument("--seconds", type=float, default=10, help="seconds of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
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
    for name, mean_of_rounds in written["measured"].items():
        prediction, measurement = Figures(**written["predicted"][name]), Figures(**mean_of_rounds["figures"])
        print(row(name, prediction, measurement, mean_of_rounds["others"]))
    for figure in FIGURES:
        errors = [
            abs(written["predicted"][name][figure] / mean_of_rounds["figures"][figure] - 1)
            for name, mean_of_rounds in written["measured"].items()
        ]
        print(f"{figure}: errors up to {max(errors):.1%}; {sum(e <= 0.1 for e in errors)} of {len(errors)} within 10 %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
