"""Converts with a small mix of precisions within a limit of perplexity: `convert --budget-perplexity`."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.block_folder.manifest import Basis, Manifest
from blockrelay.block_folder.model import ModelConfig, Precision, ungroupable
from blockrelay.block_folder.precisions import DEFAULT_PRECISION, format_precisions
from blockrelay.errors import UsageError
from blockrelay.quantities import format_quantity
from blockrelay.text.text_file import read_text_file
from blockrelay_converter.checkpoint.source import read_source
from blockrelay_converter.convert import Note, Report, basis_of, convert, ignore
from blockrelay_converter.evaluation import evaluated
from blockrelay_converter.mixing.linked_folder import link_mix
from blockrelay_converter.mixing.search import Mix, MixSearchResult, cheapest
from blockrelay_converter.staging import staged_folder

REPORT_NAME = "precisions.json"
#: Both precisions are exact. The search begins with BASE in all blocks, and changes blocks to CHEAPER.
BASE: Precision = DEFAULT_PRECISION
CHEAPER: Precision = "w4a8"


def parse_budget(text: str) -> float:
    """Returns the share of a text such as `0.5%` (0.005). Raises UsageError for another form or a negative number."""
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = math.nan
    if not (text.endswith("%") and math.isfinite(percent) and percent >= 0):
        raise UsageError(f"--budget-perplexity {text!r}: write a share such as 0.5%")
    return percent / 100


def convert_within_budget(
    checkpoint: Path,
    out: Path,
    *,
    budget: float,
    text: Path,
    tokens: int,
    report: Report,
    note: Note = ignore,
    name: str | None = None,
    max_position: int | None = None,
    force: bool = False,
    calibration_text: Path | None = None,
) -> Manifest:
    """Writes a small block folder of exact blocks whose perplexity is within the budget, and returns its manifest.

    The search (`mixing.search`) is greedy: a smaller mix within the budget may exist.
    The perplexity on the first `tokens` tokens of `text` is at most (1 + `budget`) times that of the checkpoint in
    float32. `text` is a UTF-8 file of at least two tokens, and `tokens` is at least 2. A report of the measurements
    (REPORT_NAME) lies beside the manifest. During the work, the disk holds the checkpoint in float32 and in both
    precisions. While a perplexity is measured, `report` is called with 0 bytes of 0, since it counts none. The other
    arguments are those of `convert`. Raises the errors of `convert`, and UsageError also for a checkpoint without a
    tokenizer and if BASE alone costs more than the budget. Errors leave nothing behind.
    """
    read_text_file(text)  # refuses a useless file before hours of work
    source = read_source(checkpoint, name=name, max_position=max_position)
    model = source.model
    for line in source.notes:
        note(line)
    base: Mix = (BASE,) * model.blocks
    cheaper: Mix = tuple(CHEAPER if _can_have(model, index, CHEAPER) else BASE for index in range(1, model.blocks + 1))
    with staged_folder(out, force=force) as folder:
        parts = folder / "parts"

        def part(precisions: Mix, text: Path | None, basis: Basis) -> BlockFolder:
            label = format_precisions(precisions)
            convert(
                checkpoint,
                parts / label,
                precision=label,
                report=lambda what, done, total: report(f"{label}: {what}", done, 3 * total),
                name=model.name,
                max_position=max_position,
                calibration_text=text,
                basis=basis,
            )
            return open_block_folder(parts / label, blocks=[])

        original = part(("fp32",) * model.blocks, None, "original")
        exact = [part(each, calibration_text, basis_of(base)) for each in (base, cheaper)]
        measured: dict[Mix, float] = {}

        def measure(precisions: Mix) -> float:
            if precisions not in measured:
                report(f"perplexity of {format_precisions(precisions)}", 0, 0)
                trial = parts / "trial"
                trial.mkdir()
                link_mix(exact, precisions, trial)
                measured[precisions] = evaluated("perplexity", trial, text, tokens).number("perplexity")
                shutil.rmtree(trial)
            return measured[precisions]

        report("perplexity of fp32", 0, 0)
        of_floats = evaluated("perplexity", original.root, text, tokens)
        reference, scored = of_floats.number("perplexity"), of_floats.integer("tokens")
        saved = [_bytes(exact[0], index) - _bytes(exact[1], index) for index in range(1, model.blocks + 1)]
        result = cheapest(base, cheaper, saved, limit=reference * (1 + budget), measure=measure)
        if result is None:
            cost = measured[base] / reference - 1
            raise UsageError(
                f"{BASE} alone costs {cost:.2%} of perplexity, more than {budget:.2%}: give a larger budget, or "
                "--calibrate with another text"
            )
        manifest = link_mix(exact, result.precisions, folder)
        content = _report(result, reference, budget, scored, saved)
        (folder / REPORT_NAME).write_text(json.dumps(content, indent=1) + "\n")
        shutil.rmtree(parts)
    return manifest


def report_lines(folder: Path) -> list[str]:
    """Returns the report (REPORT_NAME) that `convert_within_budget` left in a block folder, as lines for people."""
    content = json.loads((folder / REPORT_NAME).read_text())
    lines = [
        f"perplexity {content['perplexity']:.4f}, {content['cost']:.2%} above {content['reference']:.4f} in fp32 "
        f"({content['tokens']} tokens); budget {content['budget']:.2%}"
    ]
    for block, cost in content["costs"].items():
        lines.append(f"{block}: {CHEAPER} costs {cost['perplexity']:.2%}, saves {format_quantity(cost['bytes'], 'B')}")
    return lines


def _report(
    result: MixSearchResult, reference: float, budget: float, tokens: int, saved: Sequence[int]
) -> dict[str, Any]:
    """Returns the content of precisions.json; costs are shares of the reference's perplexity.

    The file is not in the manifest: its last digit may differ between machines, and the model hash must not.
    """
    return {
        "precision": format_precisions(result.precisions),
        "budget": budget,
        "tokens": tokens,
        "reference": reference,
        "perplexity": result.perplexity,
        "cost": result.perplexity / reference - 1,
        "costs": {
            f"block_{index}": {"perplexity": cost / reference, "bytes": saved[index - 1]}
            for index, cost in result.costs.items()
        },
    }


def _can_have(model: ModelConfig, index: int, precision: Precision) -> bool:
    """True if block `index` may have `precision`, independent of the other blocks."""
    return ungroupable(model, [precision if each == index else BASE for each in range(1, model.blocks + 1)]) is None


def _bytes(folder: BlockFolder, index: int) -> int:
    return folder.manifest.files[folder.manifest.block(index).file].bytes
