"""Runs a text through the model in floats and chooses the smoothing of each linear layer (`smoothing`)."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import LINEARS, quantises_rows, row_group
from blockrelay.errors import UsageError
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_converter.block_writer import BlockSource, rounded
from blockrelay_converter.quantisation.float_model import F64, FloatModel
from blockrelay_converter.quantisation.smoothing import Smoothed, smooth
from blockrelay_converter.quantisation.smoothing_scales import Smoothing, channels_of, layer_smoothing
from blockrelay_converter.rotary import Rotation

REPORT_NAME = "calibration.json"
#: Number of pieces of the text, spread evenly over it, and the length of each in tokens.
_SEQUENCES, _LENGTH = 4, 256
#: Number of rows on which errors are measured.
_MEASURED_ROWS = 128
_FEWEST_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The result of a calibration: the smoothing of each block, and the errors before and after.

    Block indexes count from 1.
    """

    text_sha256: str
    """The SHA-256 (hex) of the whole text."""
    tokens: int
    """Number of tokens that were run."""
    smoothings: Mapping[int, Smoothing]
    linears: Mapping[int, Mapping[str, Smoothed]]
    """The measurement of each linear layer, by block index, then by kind."""

    def report(self) -> bytes:
        """Returns the bytes of calibration.json: the relative error of every linear's output before and after.

        The file is not in the manifest: its last (fourth) digit may differ between machines, and the model hash must
        not.
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
    """Returns a calibration.json, given as bytes, as rows of a table: a heading, then each block's errors by linear."""
    blocks = json.loads(report)["relative_errors"]
    lines: list[tuple[str, ...]] = [("block", *LINEARS)]
    for block, linears in blocks.items():
        pairs = [linears.get(linear) for linear in LINEARS]
        lines.append((block, *("" if one is None else f"{one['before']:.4f} > {one['after']:.4f}" for one in pairs)))
    return lines


def sequences(tokenizer: Tokenizer, text: str, *, context: int) -> NDArray[np.int64]:
    """Returns pieces of the text as token ids [S, L], each after the tokenizer's beginning of text.

    L is at most `context` tokens. Raises UsageError if the text or the context is too short.
    """
    plain = tokenizer.encode(text, add_special_tokens=False)
    # Special tokens that the tokenizer puts before a prompt stand before every piece too.
    begin = tokenizer.encode("")
    length = min(_LENGTH, context) - len(begin)
    if len(plain) < _FEWEST_TOKENS or length < 1:
        raise UsageError(f"--calibrate: {len(plain)} tokens of text are too few; {_FEWEST_TOKENS} are the least")
    length = min(length, len(plain))
    count = min(_SEQUENCES, len(plain) // length)
    starts = np.linspace(0, len(plain) - length, count).astype(int)
    return np.array([begin + plain[start : start + length] for start in starts], np.int64)


def calibrate(
    source: BlockSource, rotation: Rotation, tokens: NDArray[np.int64], text: str, *, done: Callable[[int], None]
) -> Calibration:
    """Chooses the smoothing of every block by running `tokens` [S, L], the `sequences` of `text`.

    `done` is called with the index of each finished block. Memory: a few matrices of activations and a chunk of the
    weights. Raises UsageError for tokens outside the vocabulary or activations that are not finite.
    """
    model = source.model
    if int(tokens.max()) >= model.vocab_size:
        raise UsageError(f"tokenizer.json knows token {int(tokens.max())}, the model only {model.vocab_size} tokens")
    floats = FloatModel(source, *rotation.tables(0, tokens.shape[1]))
    x = floats.embed(tokens.reshape(-1))
    measured = np.linspace(0, x.shape[0] - 1, min(_MEASURED_ROWS, x.shape[0])).astype(int)
    by_block: dict[int, dict[str, Smoothed]] = {}

    def watch(linear: str, inputs: F64, *, index: int) -> None:
        precision = source.precisions[index - 1]
        if not quantises_rows(precision):
            return
        if not np.isfinite(inputs).all():
            raise UsageError(f"block_{index}: the input of {linear} is not finite: the checkpoint is damaged")
        by_block[index][linear] = smooth(
            inputs[measured].astype(np.float32),
            np.abs(inputs).max(axis=0),
            _largest(source, index, linear),
            channels_of(model, linear),
            (weights for _, weights in source.chunks(index, linear)),
            partial(rounded, precision),
            group=row_group(precision),
        )

    for index in range(1, model.blocks + 1):
        by_block[index] = {}
        if index < model.blocks:
            floats.layer(x, index, partial(watch, index=index))
        else:
            floats.head(x, partial(watch, index=index))
        source.forget(index)
        done(index)
    foldings = {
        index: layer_smoothing(model, {name: one.exponents for name, one in linears.items()})
        for index, linears in by_block.items()
    }
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Calibration(text_sha256=digest, tokens=tokens.size, smoothings=foldings, linears=by_block)


def _largest(source: BlockSource, index: int, linear: str) -> NDArray[np.float32]:
    """Returns the largest magnitude of the weights that read each input channel, [K]."""
    largest = np.zeros(source.model.linear_shape(linear)[0], np.float32)
    for _, weights in source.chunks(index, linear):
        np.maximum(largest, np.abs(weights).max(axis=0), out=largest)
    return largest


def _short(error: float) -> float:
    return float(f"{error:.4g}")
