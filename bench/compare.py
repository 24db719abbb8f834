"""Compares Blockrelay with other servers on one model and machine: `python -m bench.compare` (`make bench`).

Measures the units that are not yet in `.bench/benchmarks.json`, one after the other, and writes a page and its plot
into the same folder. `--publish` writes them into `docs/`, with newer figures from `.bench/`. Environments, models and
conversions are in `.bench/`. The table has a line for a peer that cannot be installed or measured.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.busy import busy_share
from bench.environments import Peer, install, python_of
from bench.models import block_folder, checkpoint
from bench.quality.model_file import gguf_file
from bench.records import Record, Store, faults
from bench.report import PLOT_NAME, markdown, plot
from bench.runs import BLOCKRELAY, DOCS, ENVS, ROOT, WORK, Failed, run, say
from bench.units import CASES, ON_DEMAND, PARTS, REAL, REAL_CASES, Unit, all_units
from blockrelay.errors import UsageError
from blockrelay_launcher.bench.machine import describe_machine

CONVERTED = WORK / "work"
FIGURES = "benchmarks.json"


def peer_command(unit: Unit, *more: str) -> list[str]:
    """Returns the command line of the script that measures a peer, with `more` options."""
    assert unit.peer is not None
    script = ROOT / "bench" / "peers" / unit.peer.script
    is_real = unit.shape == REAL
    cases = ",".join("x".join(map(str, case)) for case in (REAL_CASES if is_real else CASES))
    options = ["--precisions", unit.precision, "--cases", cases, "--threads", str(describe_machine()["cores"])]
    source = gguf_file() if is_real else checkpoint(unit.shape)
    return [str(python_of(unit.peer, ENVS)), str(script), str(source), str(CONVERTED), *options, *more]


def measure(unit: Unit) -> Record:
    """Runs a unit and returns its record; that of a failure has an `error`."""
    reports: list[dict[str, Any]] = []
    figures: list[dict[str, Any]] = []
    error, busy = "", busy_share()
    try:
        if unit.peer is not None:
            lines = run(peer_command(unit), log=WORK / "logs" / f"{unit.side}.log").splitlines()
            figures = [json.loads(line) for line in lines if line.startswith("{")]
        for arguments in unit.runs:
            model = block_folder(unit.shape, unit.precision)
            command = [str(BLOCKRELAY), "bench", "--model", str(model), "--json", *arguments.split()]
            report = json.loads(run(command, log=WORK / "logs" / f"{unit.part}.log"))
            report.pop("machine")  # the record has it
            reports.append({"arguments": arguments, **report})
        if unit.scenario:
            model = block_folder(unit.shape, unit.precision)
            command = [sys.executable, "-m", f"bench.scenarios.{unit.scenario}", "--model", str(model), "--json"]
            reports.append(json.loads(run(command, log=WORK / "logs" / f"{unit.part}.log")))
    except Failed as failure:
        error = str(failure)
    return _record(unit, reports=reports, figures=figures, error=error, busy=busy)


def _record(unit: Unit, **outcome: Any) -> Record:
    """Returns the record of a unit on this machine, with its reports, figures or error."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    commit = "" if unit.peer else _commit()
    machine = describe_machine()
    return Record(
        part=unit.part, side=unit.side, round=unit.round, at=at, commit=commit, machine=machine, **outcome
    )  # fmt: skip


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def prepare(units: list[Unit], store: Store) -> list[Unit]:
    """Installs peers and converts models for them; returns the units that can be measured.

    For each other unit a record with the error is stored.
    """
    broken: dict[Peer, str] = {}
    for peer in {unit.peer: None for unit in units if unit.peer}:
        say(f"preparing {peer.title}")
        broken[peer] = install(peer, ENVS)
    ready: list[Unit] = []
    converted: dict[tuple[str, str, str], str] = {}
    for unit in units:
        model = ("" if unit.peer is None else unit.peer.name, unit.shape, unit.precision)
        error = (broken[unit.peer] if unit.peer else "") or converted.get(model)
        if error is None:
            error = converted[model] = _convert(unit)
        if error:
            say(f"{unit.side}: {error}")
            store.put(_record(unit, error=error))
        else:
            ready.append(unit)
    return ready


def _convert(unit: Unit) -> str:
    """Makes or converts the model for a unit; returns the error, or an empty text."""
    try:
        if unit.peer is None:
            block_folder(unit.shape, unit.precision)
            return ""
        run(peer_command(unit, "--convert-only"), log=WORK / "logs" / f"{unit.side} convert.log", capture=False)
    except (Failed, UsageError) as failure:
        return f"cannot convert: {failure}"
    return ""


def write_pages(store: Store) -> None:
    """Writes the page of benchmarks and its plot into the folder of the figures."""
    folder = store.path.parent
    folder.mkdir(exist_ok=True)
    (folder / "benchmarks.md").write_text(markdown(store.records))
    (folder / PLOT_NAME).write_text(plot(store.records))


def opened_store(*, publish: bool, docs: Path = DOCS, work: Path = WORK) -> Store:
    """Returns the figures in `.bench/`, or with `publish` those in `docs/` after taking newer ones from `.bench/`."""
    own = Store.open(work / FIGURES)
    if not publish:
        return own
    store = Store.open(docs / FIGURES)
    store.take(own.records)
    return store


def chosen_parts(text: str) -> list[str]:
    """Parses parts such as `peers,stages`; an empty text means all but those on demand.

    Raises ValueError for an unknown part.
    """
    if not text:
        return [part for part in PARTS if part not in ON_DEMAND]
    parts = text.split(",")
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"--only {part}: there are {', '.join(PARTS)}")
    return parts


def chosen_sides(text: str) -> Callable[[Unit], bool]:
    """Returns a function that says whether a unit's side has one of the words of `a,b` in its name; no words: all."""
    words = [word.lower() for word in text.split(",") if word]
    return lambda unit: not words or any(word in unit.side.lower() for word in words)


def main() -> int:
    """Measures, writes the pages, and returns the exit code: 1 if figures are impossible."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("--only", default="", metavar="PART,PART", help=f"parts to measure, of {', '.join(PARTS)}")
    parser.add_argument("--sides", default="", metavar="WORD,WORD", help="only sides with such a word in their name")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of parts with several sides")
    parser.add_argument("--minutes", type=float, help="begin no unit after this many minutes; the next call goes on")
    parser.add_argument("--again", action="store_true", help="measure these parts and sides again")
    parser.add_argument("--prepare", action="store_true", help="install and convert, measure nothing")
    parser.add_argument(
        "--report", action="store_true", help="write the pages from the stored figures, measure nothing"
    )
    parser.add_argument("--publish", action="store_true", help="write the page and its figures into docs/")
    options = parser.parse_args()
    try:
        parts = chosen_parts(options.only)
    except ValueError as error:
        parser.error(str(error))
    chosen = chosen_sides(options.sides)
    store = opened_store(publish=options.publish)
    if not options.report:
        store.move_to(describe_machine(), parts)
    units = [] if options.report else [unit for unit in all_units(parts, rounds=options.rounds) if chosen(unit)]
    if options.again:
        store.forget({(unit.part, unit.side) for unit in units})
    measured = {record.key for record in store.records}
    units = [unit for unit in units if unit.key not in measured]
    units = prepare(units, store)
    started = time.monotonic()
    left = wrong = 0
    for number, unit in enumerate([] if options.prepare else units):
        if options.minutes and time.monotonic() - started > 60 * options.minutes:
            left = len(units) - number
            break
        say(f"{unit.part}, round {unit.round + 1}: {unit.side} ({len(units) - number - 1} to come)")
        record = measure(unit)
        if record.error:
            say(f"{unit.side}: {record.error}")
        for line in faults(record):
            say(f"{unit.side}: {line}")
            wrong += 1
        store.put(record)
        write_pages(store)
    if not options.prepare:
        write_pages(store)
    say(f"{left} units are left: call again" if left else "done")
    if wrong:
        say(f"{wrong} figures are impossible: they are errors in the table")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
