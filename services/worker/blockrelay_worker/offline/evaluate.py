"""`python -m blockrelay_worker.offline.evaluate`: measures a model's perplexity on a text, in this process.

The text is read in windows of `--context` tokens that begin every `--stride` tokens. Every token but the first is
scored once: in the first window that has it, given all tokens before it there (at least context - stride tokens, except
at the beginning). perplexity = e to the mean of -ln p(token | tokens before it in its window).

With `--json` one object is printed: model, precision, numerics_id, perplexity, nll (nats per token), bits_per_byte
(null if the scored tokens stand for no bytes), tokens (scored), bytes (of their text), windows, context, stride,
timings (load_s and total_s in seconds, ms_per_token in milliseconds per scored token). With `--against` it also has the
same of the other folder (against) and the share by which this perplexity exceeds the other's (cost). Exit code
2 and one line on stderr for bad input, 1 for failures of ours or of the machine.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from blockrelay.block_folder.folder import BlockFolder, open_block_folder
from blockrelay.command_app import run_app
from blockrelay.errors import UsageError
from blockrelay.host.cpu import check_threads, cores
from blockrelay.settings import BUNDLED_MODEL
from blockrelay.text.text_file import read_text_file
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_worker.execution.numerics_id import numerics_id
from blockrelay_worker.offline.pipeline import Pipeline

#: Rows per run: enough for full speed, and the logits of a vocabulary of 128,000 stay at 125 MiB.
CHUNK_ROWS = 256
#: Tokens per window without `--context`, if the model's own context is longer.
DEFAULT_CONTEXT = 1024

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredWindow:
    """Tokens `first` to `end` - 1 of a text, of which those from `scored` on are scored."""

    first: int
    scored: int
    end: int


def windows(tokens: int, *, context: int, stride: int) -> list[ScoredWindow]:
    """The windows over a text of `tokens` >= 2 tokens, which score each token but the first once.

    Needs 1 <= stride < context.
    """
    result = [ScoredWindow(first=0, scored=1, end=min(context, tokens))]
    while result[-1].end < tokens:
        last = result[-1]
        first = last.first + stride
        result.append(ScoredWindow(first=first, scored=last.end, end=min(first + context, tokens)))
    return result


def _losses(pipeline: Pipeline, tokens: Sequence[int], scored: int) -> list[float]:
    """-ln p of the tokens from `scored` >= 1 on, each given all tokens before it. Raises RowNotFinite."""
    losses: list[float] = []
    for first in range(0, len(tokens) - 1, CHUNK_ROWS):  # the last token predicts nothing that is scored
        end = min(first + CHUNK_ROWS, len(tokens) - 1)
        wanted = range(max(scored - 1 - first, 0), end - first)
        rows = pipeline.run(tokens[first:end], first, wanted=wanted)
        targets = tokens[first + 1 : end + 1][wanted.start :]
        losses += [_loss(row, target) for row, target in zip(rows, targets, strict=True)]
    return losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result on one text: `nll` in nats, summed over `tokens` scored tokens, which are `bytes` bytes of text."""

    nll: float
    tokens: int
    bytes: int
    windows: int

    @property
    def perplexity(self) -> float:
        """e to the mean loss in nats per token."""
        return math.exp(self.nll / self.tokens)

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits per byte of text; None for a text of 0 bytes."""
        return self.nll / math.log(2) / self.bytes if self.bytes else None


def score(
    pipeline: Pipeline,
    tokens: Sequence[int],
    tokenizer: Tokenizer,
    *,
    context: int,
    stride: int,
    done: Callable[[int, int], None],
) -> Score:
    """Scores a text of at least two tokens, in windows of `context` tokens that begin every `stride` tokens.

    Needs 1 <= stride < context, and a pipeline with room for a window's tokens. Calls `done` with (windows done,
    windows in all) after each window. Raises RowNotFinite if the model gives NaN or infinity, and ExecutionError if a
    block fails.
    """
    losses: list[float] = []
    every = windows(len(tokens), context=context, stride=stride)
    for number, window in enumerate(every, 1):
        losses += _losses(pipeline, tokens[window.first : window.end], window.scored - window.first)
        done(number, len(every))
    size = sum(len(tokenizer.bytes.of(token)) for token in tokens[1:])
    return Score(nll=math.fsum(losses), tokens=len(losses), bytes=size, windows=len(every))


@app.command()
def main(
    text: Annotated[Path, typer.Option(help="UTF-8 file to predict")],
    model: Annotated[
        Path, typer.Option(help="block folder [default: the bundled model]", show_default=False)
    ] = BUNDLED_MODEL,
    context: Annotated[
        int | None, typer.Option(min=2, help=f"tokens per window [default: the model's, {DEFAULT_CONTEXT} at most]")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="tokens from window to window [default: half the context]")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="use only this many tokens of the text")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, callback=check_threads, help="[default: the cores of this machine]")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="another block folder: say what the first costs beside it")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Measure the perplexity of a block folder's model on a text."""
    content = read_text_file(text)
    folder = open_block_folder(model)
    limit = folder.model.max_position
    context = min(DEFAULT_CONTEXT, limit) if context is None else context
    stride = max(1, context // 2) if stride is None else stride
    if context > limit:
        raise UsageError(f"--context {context} is beyond the model's context of {limit}")
    if stride >= context:
        raise UsageError(f"--stride {stride} must be below the context of {context}: every token needs one before it")
    reading = EvaluatedText(
        file=text, text=content, tokens=tokens, context=context, stride=stride, threads=threads or cores()
    )
    other = None if against is None else open_block_folder(against)
    if other is not None and (other.model.vocab_size, other.model.max_position) != (folder.model.vocab_size, limit):
        raise UsageError(f"{against}: another vocabulary or context than {model}; their perplexities do not compare")
    report = _evaluate(folder, reading)
    if other is not None:
        report["against"] = _evaluate(other, reading)
        report["cost"] = report["perplexity"] / report["against"]["perplexity"] - 1
    typer.echo(json.dumps(report) if as_json else _lines(report))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedText:
    """A text, and the settings with which it is read."""

    file: Path
    text: str
    tokens: int | None
    """Number of tokens to use at most; None: all."""
    context: int
    """Tokens per window."""
    stride: int
    """Tokens from the beginning of a window to that of the next."""
    threads: int


def _evaluate(folder: BlockFolder, reading: EvaluatedText) -> dict[str, Any]:
    """Scores one model and returns its report. Raises UsageError without a tokenizer, or for a text too short."""
    started = time.perf_counter()
    if folder.tokenizer_path is None:
        raise UsageError(f"{folder.root}: the model has no tokenizer, so it cannot read a text")
    tokenizer = Tokenizer.from_file(folder.tokenizer_path)
    ids = tokenizer.encode(reading.text)[: reading.tokens]
    if len(ids) < 2:
        raise UsageError(f"{reading.file}: {len(ids)} token(s) of text; at least 2 are needed to predict one")
    context, stride = reading.context, reading.stride
    pipeline = Pipeline(folder, stages=1, threads=reading.threads, tokens=min(context, len(ids)))
    loaded = time.perf_counter()
    result = score(pipeline, ids, tokenizer, context=context, stride=stride, done=show_progress)
    return _report(folder, result, context, stride, load_s=loaded - started, total_s=time.perf_counter() - loaded)


def _loss(logits: NDArray[np.float32], target: int) -> float:
    """-ln softmax(logits)[target]. It chooses no token, so NumPy's own exp, whose bits vary, will do."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return float(np.log(np.exp(shifted).sum()) - shifted[target])


def show_progress(done: int, windows: int) -> None:
    """Writes how many windows are done to stderr, on one line, if that is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\rwindow {done} of {windows}" + ("\r\033[K" if done == windows else ""))
        sys.stderr.flush()


def _report(
    folder: BlockFolder, result: Score, context: int, stride: int, *, load_s: float, total_s: float
) -> dict[str, Any]:
    return {
        "model": folder.model.name,
        "precision": folder.manifest.precision,
        "numerics_id": numerics_id(folder.manifest),
        "perplexity": result.perplexity,
        "nll": result.nll / result.tokens,
        "bits_per_byte": result.bits_per_byte,
        "tokens": result.tokens,
        "bytes": result.bytes,
        "windows": result.windows,
        "context": context,
        "stride": stride,
        "timings": {"load_s": load_s, "total_s": total_s, "ms_per_token": 1000 * total_s / result.tokens},
    }


def _lines(report: dict[str, Any]) -> str:
    bits = report["bits_per_byte"]
    other = report.get("against")
    return (
        f"perplexity {report['perplexity']:.4f}  ({report['nll']:.4f} nats per token, "
        + ("" if bits is None else f"{bits:.4f} bits per byte, ")
        + f"{report['timings']['ms_per_token']:.2f} ms per token)\n"
        + f"{report['model']}, {report['precision']}: {report['tokens']} tokens, {report['bytes']} bytes, "
        + f"{report['windows']} windows of {report['context']} every {report['stride']}"
        + (
            ""
            if other is None
            else f"\ncosts {report['cost']:+.2%}: {other['model']}, {other['precision']}, has {other['perplexity']:.4f}"
        )
    )


def run(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code (see `run_app`)."""
    return run_app(app, arguments, name="blockrelay evaluate")


if __name__ == "__main__":
    sys.exit(run())
