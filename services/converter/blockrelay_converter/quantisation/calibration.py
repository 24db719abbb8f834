"""Runs a text through the model in floats and finds how each linear layer is best rounded.

For each layer that is its smoothing (`smoothing`), and how its weights make up for the errors of others (`gptq`).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockrelay.block_folder.model import hadamard_size, quantises_rows, row_group
from blockrelay.errors import UsageError
from blockrelay.text.tokenizer import Tokenizer
from blockrelay_converter.block_writer import BlockSource, rounded
from blockrelay_converter.quantisation.calibration_record import CalibratedBlock, CalibrationRecord
from blockrelay_converter.quantisation.float_model import FloatModel
from blockrelay_converter.quantisation.gptq import feedback_of
from blockrelay_converter.quantisation.hadamard import transform
from blockrelay_converter.quantisation.smoothing import Smoothed, smooth
from blockrelay_converter.quantisation.smoothing_scales import Smoothing, channels_of, layer_smoothing
from blockrelay_converter.rotary import Rotation
from blockrelay_converter.weight_source import F64

#: Number of tokens that are read, in pieces of this length spread evenly over the text, and the fewest that will do:
#: from fewer, GPTQ learns what happens to come together in them.
_TOKENS, _LENGTH, _FEWEST_TOKENS = 2048, 512, 2048
#: Number of rows on which errors are measured.
_MEASURED_ROWS = 128


def sequences(tokenizer: Tokenizer, text: str, *, context: int) -> NDArray[np.int64]:
    """Returns pieces of the text as token ids [S, L], each after the tokenizer's beginning of text.

    L is at most `context` tokens. Raises UsageError if the text or the context is too short.
    """
    plain = tokenizer.encode(text, add_special_tokens=False)
    # Special tokens that the tokenizer puts before a prompt stand before every piece too.
    begin = tokenizer.encode("")
    length = min(_LENGTH, context) - len(begin)
    if length < 1:
        raise UsageError(f"--calibrate: a context of {context} token(s) leaves no room for text")
    if len(plain) < _FEWEST_TOKENS:
        raise UsageError(f"--calibrate: {len(plain)} tokens of text are too few; {_FEWEST_TOKENS} are the least")
    count = min(_TOKENS, len(plain)) // length
    starts = np.linspace(0, len(plain) - length, count).astype(int)
    return np.array([begin + plain[start : start + length] for start in starts], np.int64)


class Calibration:
    """A text on its way through the model, block by block.

    Memory: some matrices of activations in float64, 1.2 GB for a model of 8 billion parameters.
    """

    def __init__(self, source: BlockSource, rotation: Rotation, tokens: NDArray[np.int64], text_sha256: str) -> None:
        """`tokens` [S, L] are the `sequences` of a text with this SHA-256 (hex).

        Raises UsageError for tokens outside the vocabulary.
        """
        known = source.model.vocab_size
        if int(tokens.max()) >= known:
            raise UsageError(f"tokenizer.json knows token {int(tokens.max())}, the model only {known} tokens")
        self._source, self._tokens, self._text_sha256 = source, tokens, text_sha256
        self._floats = FloatModel(source, *rotation.tables(0, tokens.shape[1]))
        self._x = self._floats.embed(tokens.reshape(-1))
        rows = len(self._x)
        self._measured = np.linspace(0, rows - 1, min(_MEASURED_ROWS, rows)).astype(int)
        self._linears: dict[int, dict[str, Smoothed]] = {}

    def run(self, index: int) -> tuple[Smoothing, dict[str, list[F64]]]:
        """Runs block `index` and returns its smoothing, and the feedback of its linear layers by kind (`gptq`).

        Blocks come in order, from 1. Raises UsageError for activations that are not finite.
        """
        assert index == len(self._linears) + 1
        model, smoothed = self._source.model, dict[str, Smoothed]()
        feedback: dict[str, list[F64]] = {}
        self._linears[index] = smoothed

        def watch(linear: str, inputs: F64) -> None:
            if quantises_rows(self._source.precisions[index - 1]):
                smoothed[linear], feedback[linear] = self._rounding(index, linear, inputs)

        if index < model.blocks:
            self._floats.layer(self._x, index, watch)
        else:
            self._floats.head(self._x, watch)
        return layer_smoothing(model, {name: one.exponents for name, one in smoothed.items()}), feedback

    def _rounding(self, index: int, linear: str, inputs: F64) -> tuple[Smoothed, list[F64]]:
        """Returns how a linear layer with the `inputs` [rows, K] is rounded: its smoothing and its feedback."""
        model, precision = self._source.model, self._source.precisions[index - 1]
        if not np.isfinite(inputs).all():
            raise UsageError(f"block_{index}: the input of {linear} is not finite: the checkpoint is damaged")
        channels = channels_of(model, linear)
        smoothed = smooth(
            inputs[self._measured].astype(np.float32),
            np.abs(inputs).max(axis=0),
            _largest(self._source, index, linear),
            channels,
            (weights for _, weights in self._source.chunks(index, linear)),
            partial(rounded, precision),
            group=row_group(precision),
        )
        columns = np.array(inputs.T, order="C")
        np.ldexp(columns, -smoothed.exponents[channels][:, None], out=columns)
        if linear == "down" and (size := hadamard_size(model, precision)):
            transform(columns, size)
        return smoothed, feedback_of(columns)

    def pass_through(self, index: int) -> None:
        """Runs block `index` like `run` without a look at how it is rounded: it has been, in a folder before."""
        self._linears[index] = {}
        if index < self._source.model.blocks:
            self._floats.layer(self._x, index, lambda *_: None)

    def record(
        self, sources: Mapping[int, str], files: Mapping[int, str], kept: Mapping[int, CalibratedBlock]
    ) -> CalibrationRecord:
        """Returns what calibration.json says of the folder, once all blocks have run.

        `sources` and `files` have the SHA-256 of the tensors and of the file of each block, by number, and `kept` the
        blocks of an earlier folder that were taken as they are.
        """
        own = {
            index: CalibratedBlock(sources[index], files[index], _errors(linears))
            for index, linears in self._linears.items()
        }
        return CalibrationRecord(self._text_sha256, self._tokens, own | dict(kept))


def _errors(linears: Mapping[str, Smoothed]) -> dict[str, Any]:
    """Returns the relative errors of linear layers before and after smoothing (`CalibratedBlock.errors`)."""
    return {
        name: {"before": _short(one.before), "after": _short(one.after), "share": one.share}
        for name, one in linears.items()
    }


def _largest(source: BlockSource, index: int, linear: str) -> NDArray[np.float32]:
    """Returns the largest magnitude of the weights that read each input channel, [K]."""
    largest = np.zeros(source.model.linear_shape(linear)[0], np.float32)
    for _, weights in source.chunks(index, linear):
        np.maximum(largest, np.abs(weights).max(axis=0), out=largest)
    return largest


def _short(error: float) -> float:
    return float(f"{error:.4g}")
