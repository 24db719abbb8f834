"""Compares predicted with measured speeds of plans: `python -m bench.scenarios.plan_accuracy` (`make bench-plans`).

It profiles the w8a8 model on this machine, with all cores for a worker and with one, writes down what the planner
predicts for twelve settings, and only then runs them: 1 to 3 stages, even and uneven, w8a8 and w4a8 (never profiled), a
worker at half its speed (never profiled), 1 to 16 requests. Then every strategy plans for this machine and one half as
fast, for one request and for sixteen, and its plan is run too. At the end it checks whether the measured speeds are
within the ranges that the planner gives without a profile. Run it on an otherwise idle machine of two cores. Figures
are never asserted.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.models import block_folder
from blockrelay.block_folder.folder import open_block_folder
from blockrelay.host.child_command import run_command
from blockrelay.host.cpu import cores
from blockrelay_launcher.background import running_redis
from blockrelay_launcher.bench.figures import decode_rate, random_prompts
from blockrelay_launcher.bench.targets import GatewaySide

PROMPT, NEW, WARM_UP_NEW = 64, 64, 8
#: The promised context. Predictions are for half of it, which is the middle of a measured answer.
CONTEXT = 2 * (PROMPT + NEW // 2)
HALF = 0.5
BLOCKRELAY = Path(sys.executable).with_name("blockrelay")
OTHERS = ("uniform", "memory", "compute", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A system and a load to predict and measure."""

    name: str
    precision: str
    threads: int
    """Threads of each worker."""
    requests: int
    """Requests at once."""
    parts: tuple[tuple[int, int, str], ...] = ()
    """(first block, last block, device) of each stage. Devices `a...` are on host a, and `b` on host b, which is half
    as fast."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each stage."""
        return tuple(device for _, _, device in self.parts)

    @property
    def boundaries(self) -> str:
        """The blocks of the stages as text, `1-3,4-9`."""
        return ",".join(f"{first}-{last}" for first, last, _ in self.parts)


def settings(blocks: int, all_cores: int) -> list[Setting]:
    """Returns the twelve settings for a model of `blocks` blocks, on a machine of `all_cores` cores."""

    def parts(*ends: tuple[float, str]) -> tuple[tuple[int, int, str], ...]:
        """Returns stages that end at these shares of the blocks, each with its device."""
        stages: list[tuple[int, int, str]] = []
        for share, device in ends:
            first = stages[-1][1] + 1 if stages else 1
            stages.append((first, max(first, round(share * blocks)), device))
        return tuple(stages)

    whole, even = parts((1, "a0")), parts((1 / 2, "a0"), (1, "a1"))
    uneven, three = parts((1 / 4, "a0"), (1, "a1")), parts((1 / 3, "a0"), (2 / 3, "a1"), (1, "a2"))
    slow, slow_uneven = parts((1 / 2, "a0"), (1, "b")), parts((3 / 4, "a0"), (1, "b"))
    table = [
        ("1 stage", "w8a8", all_cores, 1, whole),
        ("1 stage", "w8a8", all_cores, 4, whole),
        ("1 stage", "w8a8", all_cores, 16, whole),
        ("2 stages", "w8a8", all_cores, 16, even),
        ("2 uneven stages", "w8a8", all_cores, 4, uneven),
        ("3 stages", "w8a8", all_cores, 16, three),
        ("1 stage", "w4a8", all_cores, 1, whole),
        ("1 stage", "w4a8", all_cores, 16, whole),
        ("2 uneven stages", "w4a8", all_cores, 4, uneven),
        ("2 stages, one half as fast", "w8a8", 1, 16, slow),
        ("2 uneven stages, one half as fast", "w8a8", 1, 4, slow_uneven),
        ("2 stages, one half as fast", "w4a8", 1, 1, slow),
    ]
    return [Setting(name=n, precision=p, threads=t, requests=r, parts=parts_) for n, p, t, r, parts_ in table]


@dataclass(frozen=True, slots=True)
class Bench:
    """The files of the measurement."""

    models: dict[str, Path]
    """Block folders, by precision."""
    folder: Path
    """The folder for output."""
    profiles: dict[int, Path]
    """Profiles, by threads of a worker."""

    def plan(self, setting: Setting, *more: str) -> dict[str, Any]:
        """Returns the plan of `blockrelay plan --json` for the devices of `setting`, with `more` options.

        Raises RuntimeError when the command fails.
        """
        devices = self.folder / "devices.json"
        named = sorted(set(setting.devices))
        entries = [
            {"id": name, "class": "CPU", "host": name[0], "speed": HALF if name == "b" else 1.0} for name in named
        ]
        devices.write_text(json.dumps({"devices": entries}))
        done = run_command([
            BLOCKRELAY, "plan", "--model", self.models["w8a8"], "--profile", self.profiles[setting.threads],
            "--devices", devices, "--context", str(CONTEXT), "--precision", setting.precision,
            "--requests", str(setting.requests), "--json", *more,
        ])  # fmt: skip
        return json.loads(done.check(setting.name))

    def predicted(self, setting: Setting) -> float:
        """Returns the predicted tokens per second."""
        targets = ",".join(setting.devices)
        plan = self.plan(setting, "--strategy", "custom", "--boundaries", setting.boundaries, "--targets", targets)
        return plan["predicted_tokens_per_second"][str(setting.requests)]

    def measured(self, setting: Setting, rounds: int) -> float:
        """Measures the tokens per second while all requests decode, the median of `rounds`."""
        model = self.models[setting.precision]
        dice, vocabulary = random.Random(7), open_block_folder(model, blocks=[]).model.vocab_size
        with serving(setting, model) as url:
            side = GatewaySide(url, open_block_folder(model, blocks=[]).model.name)
            rates: list[float] = []
            for number in range(-1, rounds):
                new = NEW if number >= 0 else WARM_UP_NEW
                one = side.round(random_prompts(dice, vocabulary, setting.requests, PROMPT), new)
                rates.append(decode_rate(one.tokens))
            side.close()
        return median(rates[1:])


@contextmanager
def serving(setting: Setting, model: Path) -> Iterator[str]:
    """Runs a setting as the hosts of a topology, each with an `up` of its own, on one Redis; yields the gateway's URL.

    Raises RuntimeError for a host that does not get ready.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="br-plans-")))
        control = stack.enter_context(running_redis(durable=True))
        payload = stack.enter_context(running_redis(durable=False))
        hosts: dict[str, Any] = {}
        for device in sorted(set(setting.devices)):
            entry = hosts.setdefault(device[0], {"roles": ["worker"], "devices": []})
            entry["devices"].append({"id": device, "threads": setting.threads, "bytes_per_second": "20GB/s"})
        hosts["a"] |= {"roles": ["scheduler", "gateway", "worker"], "port": 0}
        topology = {
            "model": str(model), "strategy": "custom", "boundaries": setting.boundaries,
            "targets": ",".join(setting.devices), "redis": control, "payload_redis": payload, "hosts": hosts,
        }  # fmt: skip
        (folder / "topology.json").write_text(json.dumps(topology))
        processes = {
            name: stack.enter_context(host(folder, name, {"BLOCKRELAY_INJECT_SPEED": str(HALF)} if name == "b" else {}))
            for name in hosts
        }
        lines: dict[str, str] = {}
        for name, process in processes.items():  # after all have started: a stage is ready only with the others
            assert process.stdout is not None
            lines[name] = process.stdout.readline()
            if not lines[name].startswith("ready"):
                raise RuntimeError(f"{setting.name}: host {name}: {(folder / f'{name}.log').read_text()[-2000:]}")
        yield lines["a"].split()[1]


@contextmanager
def host(folder: Path, name: str, environment: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """Starts `up` of one host, and yields its process without waiting until it is ready."""
    command = [BLOCKRELAY, "up", "--topology", folder / "topology.json", "--host", name, "--no-speculation"]
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [*map(str, command), "--data", str(folder / name)],
            stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **environment},
        )  # fmt: skip
        with process:
            try:
                yield process
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


def profiled(model: Path, threads: int, out: Path) -> Path:
    """Profiles the model with workers of `threads` threads into the file `out`, and returns it.

    If that leaves cores for host b, a neighbour computes meanwhile as host b would: these two hosts share the memory of
    one machine, which real hosts would not.
    """
    with ExitStack() as stack:
        if threads < cores():
            stack.enter_context(neighbour(model, threads))
        subprocess.run([BLOCKRELAY, "profile", "--model", model, "--threads", str(threads), "--out", out], check=True)
    return out


@contextmanager
def neighbour(model: Path, threads: int) -> Iterator[None]:
    """Runs a process that computes steps of the model on `threads` threads all the time, as host b does."""
    argv = [sys.executable, "-m", "bench.neighbour", str(model), "--threads", str(threads), "--speed", str(HALF)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


def strategies(bench: Bench, requests: int) -> Iterator[tuple[str, Setting, float]]:
    """Yields each strategy's name, its plan for this machine and one half as fast, and the predicted tokens/s."""
    pair = Setting(name="", precision="w8a8", threads=1, requests=requests, parts=((1, 1, "a0"), (2, 2, "b")))
    objective = "latency" if requests == 1 else "throughput"
    for strategy in ("auto", *OTHERS):
        plan = bench.plan(pair, "--strategy", strategy, "--objective", objective)
        parts: list[tuple[int, int, str]] = []
        for stage in plan["stages"]:
            first, _, last = stage["blocks"].partition("-")
            parts.append((int(first), int(last or first), stage["device"]))
        yield strategy, replace(pair, parts=tuple(parts)), plan["predicted_tokens_per_second"][str(requests)]


def not_profiled(model: Path) -> dict[str, list[float]]:
    """Returns the least and the most tokens per second that are predicted without a profile, by requests at once."""
    argv = [BLOCKRELAY, "plan", "--model", model, "--context", str(CONTEXT), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["tokens_per_second_range"]


def error(predicted: float, measured: float) -> float:
    """Returns the relative error of a prediction."""
    return abs(predicted / measured - 1)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a line for each setting."""
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        print(
            f"{row['name']:36} {row['precision']:5} {row['requests']:3} requests  {row['boundaries']:24} "
            f"predicted {predicted:8.1f}  measured {measured:8.1f}  {100 * (predicted / measured - 1):+6.1f} %"
        )


def main(arguments: list[str] | None = None) -> int:
    """Predicts, measures, prints the figures, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama160m", help="shape of the model (a shape of bench/checkpoint.py)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each setting")
    parser.add_argument(
        "--out", type=Path, default=Path(".bench/plan_accuracy"), help="folder for profiles and figures"
    )
    chosen = parser.parse_args(arguments)
    out = chosen.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    models = {precision: block_folder(chosen.shape, precision).absolute() for precision in ("w8a8", "w4a8")}
    profiles = {n: profiled(models["w8a8"], n, out / f"profile-{n}.json") for n in {1, cores()}}
    bench = Bench(models, out, profiles)
    blocks = open_block_folder(models["w8a8"], blocks=[]).model.blocks

    every = [(s.name, s, bench.predicted(s)) for s in settings(blocks, cores())]
    compared = {requests: list(strategies(bench, requests)) for requests in (1, 16)}
    written = [{**asdict(s), "name": name, "predicted": predicted} for name, s, predicted in every]
    (out / "predictions.json").write_text(json.dumps(written, indent=1))

    rows: list[dict[str, Any]] = []
    for name, setting, predicted in [*every, *(one for some in compared.values() for one in some)]:
        measured = bench.measured(setting, chosen.rounds)
        row = {
            **asdict(setting),
            "name": name,
            "boundaries": setting.boundaries,
            "predicted": predicted,
            "measured": measured,
        }
        rows.append(row)
        show([row])
    (out / "measured.json").write_text(json.dumps(rows, indent=1))
    errors = [error(row["predicted"], row["measured"]) for row in rows[: len(every)]]
    ranges = not_profiled(models["w8a8"])
    for row in (row for row in rows[: len(every)] if row["name"] == "1 stage" and row["precision"] == "w8a8"):
        least, most = ranges[str(row["requests"])]
        where = "within" if least <= row["measured"] <= most else "OUTSIDE"
        print(f"not profiled, {row['requests']} requests: {least:.1f} to {most:.1f}, measured is {where}")
    print(f"twelve settings: median error {median(errors):.1%}, worst {max(errors):.1%}")
    for requests in compared:
        some = [row for row in rows[len(every) :] if row["requests"] == requests]
        for figure in ("predicted", "measured"):
            best = max(row[figure] for row in some if row["name"] != "auto")
            print(f"{requests} requests: auto over the best of the others, {figure}: {some[0][figure] / best:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
