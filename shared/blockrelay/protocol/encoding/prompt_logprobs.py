"""Encodes the log probabilities of a prompt's tokens for the terminal entry of a request's log.

The last stage writes them there, and not to the payload Redis, because they are as durable as the tokens then: every
gateway can answer from the log, for as long as the request is kept.
"""

import base64
import binascii
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockrelay.errors import WireError

#: Most numbers that the answers to one body may have: its prompts' tokens, times one more than the listed alternatives.
MAX_PROMPT_VALUES = 1 << 18
#: Rows, and alternatives of each.
_HEADER = struct.Struct("<II")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptLogprobs:
    """The log probabilities of the tokens of a prompt, without those of its first token, which nothing predicts.

    Row i is about the token at position i + 1, given all tokens before it. All arrays have `n` rows, one less than the
    prompt has tokens; alternatives are the `k` most likely tokens, best first, ties by lower id.
    """

    logprobs: NDArray[np.float64]
    """The log probability of the token itself, [n]."""
    ranks: NDArray[np.uint32]
    """The place of the token itself among all tokens, ties by lower id, [n]; 1: the most likely one."""
    top_ids: NDArray[np.uint32]
    """The ids of the most likely tokens, [n, k]."""
    top_logprobs: NDArray[np.float64]
    """The log probabilities of the most likely tokens, [n, k]."""

    def encode(self) -> str:
        """Returns the numbers as text of base64, 12 bytes for each number and 4 for each row."""
        rows, listed = self.top_ids.shape
        return base64.b64encode(
            _HEADER.pack(rows, listed)
            + self.logprobs.astype("<f8").tobytes()
            + self.ranks.astype("<u4").tobytes()
            + self.top_ids.astype("<u4").tobytes()
            + self.top_logprobs.astype("<f8").tobytes()
        ).decode()

    @classmethod
    def decode(cls, encoded: object, *, tokens: int) -> "PromptLogprobs":
        """Reads the text of `encode` for a prompt of `tokens` tokens. Raises WireError for anything else."""
        try:
            raw = base64.b64decode(encoded, validate=True) if isinstance(encoded, str) else b""
        except (binascii.Error, ValueError) as error:
            raise WireError("the log probabilities of a prompt are not base64") from error
        if len(raw) < _HEADER.size:
            raise WireError("the log probabilities of a prompt are missing")
        rows, listed = _HEADER.unpack_from(raw)
        values = rows * listed
        if rows != tokens - 1 or len(raw) != _HEADER.size + 12 * (rows + values):
            raise WireError(
                f"there are log probabilities of {rows} tokens for a prompt of {tokens}, or not all of them"
            )
        at = _HEADER.size
        parts: list[NDArray[np.generic]] = []
        for dtype, count in (("<f8", rows), ("<u4", rows), ("<u4", values), ("<f8", values)):
            parts.append(np.frombuffer(raw, dtype, count, at))
            at += parts[-1].nbytes
        logprobs, ranks, ids, alternatives = parts
        return cls(
            logprobs=logprobs.astype(np.float64),
            ranks=ranks.astype(np.uint32),
            top_ids=ids.astype(np.uint32).reshape(rows, listed),
            top_logprobs=alternatives.astype(np.float64).reshape(rows, listed),
        )
