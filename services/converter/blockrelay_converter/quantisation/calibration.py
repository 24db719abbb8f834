"""Looks at a text go through the model in floats and decides, linear by linear, what to fold (`folding`)."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import LINEARS, Precision, quantises_rows
from blockrelay.errors import UsageError
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_converter.block_writer import BlockSource, rounded
from blockrelay_converter.checkpoint.config import Rotary
from blockrelay_converter.quantisation.float_model import F64, FloatModel
from blockrelay_converter.quantisation.folding import Exponents, Folding, channels_of, layer_folding
from blockrelay_converter.quantisation.smoothing import Smoothed, smooth
from blockrelay_converter.rotary import rotary_tables

REPORT_NAME = "calibration.json"
#: Pieces of the text, spread over it evenly, and their length in tokens.
_SEQUENCES, _LENGTH = 4, 256
#: Rows, of all, on which the errors are measured.
_MEASURED_ROWS = 128
_FEWEST_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a text says about a model. `linears`: block index -> linear -> what was found."""

    text_sha256: str
    tokens: int
    foldings: Mapping[int, Folding]
    linears: Mapping[int, Mapping[str, Smoothed]]

    def report(self) -> bytes:
        """calibration.json: relative error of every linear's output before and after, to four digits.

        Not among the manifest's files: the last digit may differ between machines, and the model hash must not.
        """
        blocks = {
            f"block_{index}": {
                name: {"before": _short(one.before), "after": _short(one.after), "share": one.share}
                for name, one in linears.items()
            }
            for index, linears in self.linears.items()
        }
        content = {"text_sha256": self.text_sha256, "tokens": self.tokens, "relative_errors": blocks}
        return json.dumps(content, indent=1).encode() + b"\n"


def report_table(report: bytes) -> list[tuple[str, ...]]:
    """A report for people: a heading, then a line per block with the error of each linear, before and after."""
    blocks = json.loads(report)["relative_errors"]
    lines: list[tuple[str, ...]] = [("block", *LINEARS)]
    for block, linears in blocks.items():
        pairs = [linears.get(linear) for linear in LINEARS]
        lines.append((block, *("" if one is None else f"{one['before']:.4f} > {one['after']:.4f}" for one in pairs)))
    return lines


def sequences(tokenizer: Tokenizer, text: str, *, context: int) -> NDArray[np.int64]:
    """[S, L]: pieces of the text, each begun as the tokenizer begins a text. UsageError if the text is too short."""
    plain = tokenizer.encode(text, add_special_tokens=False)
    # What a template adds (a beginning of text, as a rule) stands before every piece, as it does before a prompt.
    begin = tokenizer.encode("")
    length = min(_LENGTH, context) - len(begin)
    if len(plain) < _FEWEST_TOKENS or length < 1:
        raise UsageError(f"--calibrate: {len(plain)} tokens of text are too few; {_FEWEST_TOKENS} are the least")
    length = min(length, len(plain))
    count = min(_SEQUENCES, len(plain) // length)
    starts = np.linspace(0, len(plain) - length, count).astype(int)
    return np.array([begin + plain[start : start + length] for start in starts], np.int64)


def calibrate(
    source: BlockSource, rotary: Rotary, tokens: NDArray[np.int64], text: str, *, done: Callable[[int], None]
) -> Calibration:
    """Decide the folding of every block by `tokens` [S, L], the `sequences` of `text`.

    `done` is told each block's index. Memory: a few matrices of activations, no more than a chunk of the weights.
    """
    model = source.model
    if int(tokens.max()) >= model.vocab_size:
        raise UsageError(f"tokenizer.json knows token {int(tokens.max())}, the model only {model.vocab_size} tokens")
    cos, sin = rotary_tables(rotary, head_dim=model.head_dim, first=0, stop=tokens.shape[1])
    floats = FloatModel(source, cos, sin)
    x = floats.embed(tokens.reshape(-1))
    measured = np.linspace(0, x.shape[0] - 1, min(_MEASURED_ROWS, x.shape[0])).astype(int)
    foldings: dict[int, Folding] = {}
    found: dict[int, dict[str, Smoothed]] = {}
    for index in range(1, model.blocks + 1):
        linears: dict[str, Smoothed] = {}
        precision = source.precisions[index - 1]

        def watch(
            linear: str,
            inputs: F64,
            index: int = index,
            linears: dict[str, Smoothed] = linears,
            precision: Precision = precision,
        ) -> None:
            if not quantises_rows(precision):
                return
            if not np.isfinite(inputs).all():
                raise UsageError(f"block_{index}: the input of {linear} is not finite: the checkpoint is damaged")
            linears[linear] = smooth(
                inputs[measured].astype(np.float32),
                np.abs(inputs).max(axis=0),
                _largest(source, index, linear),
                channels_of(model, linear),
                (weights for _, weights in source.chunks(index, linear)),
                partial(rounded, precision),
            )

        if index < model.blocks:
            floats.layer(x, index, watch)
        else:
            floats.head(x, watch)
        source.forget(index)
        found[index] = linears
        exponents: dict[str, Exponents] = {name: one.exponents for name, one in linears.items()}
        foldings[index] = layer_folding(model, exponents)
        done(index)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Calibration(text_sha256=digest, tokens=tokens.size, foldings=foldings, linears=found)


def _largest(source: BlockSource, index: int, linear: str) -> NDArray[np.float32]:
    """[K]: the largest magnitude of the weights that read each input channel."""
    found = np.zeros(source.model.linear_shape(linear)[0], np.float32)
    for _, weights in source.chunks(index, linear):
        np.maximum(found, np.abs(weights).max(axis=0), out=found)
    return found


def _short(error: float) -> float:
    return float(f"{error:.4g}")
