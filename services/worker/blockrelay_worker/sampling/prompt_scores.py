"""Scores the tokens of a prompt by the logits before them: log probability, rank, and the likeliest tokens instead.

The numbers are a pure function of model and prompt. A row gives the same bits in any chunk and any batch, because each
is scored alone, with the arithmetic that gives sampled tokens their log probabilities (`sampler.log_probabilities`).
"""

import numpy as np
from numpy.typing import NDArray

from blockrelay.protocol.encoding.prompt import TokenIds
from blockrelay.protocol.encoding.prompt_logprobs import PromptLogprobs
from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.execution.selection import Largest, LogitRows
from blockrelay_worker.sampling.row_sampler import Sampler
from blockrelay_worker.sampling.sampler import Draw

#: A logit above all others: a greedy draw can then give no other token.
_CERTAIN = 1e300


class PromptScores:
    """The scores of a prompt's tokens so far, in order of their positions. Rows of logits are not kept."""

    def __init__(self, prompt: TokenIds, listed: int, *, vocab_size: int) -> None:
        """`listed` is the number of most likely tokens to list for each token, as `SamplingParams.prompt_logprobs`."""
        rows, listed = prompt.size - 1, min(listed, vocab_size)
        self._prompt, self._params = prompt, SamplingParams(temperature=0, logprobs=listed)
        self._found = PromptLogprobs(
            logprobs=np.empty(rows),
            ranks=np.empty(rows, np.uint32),
            top_ids=np.empty((rows, listed), np.uint32),
            top_logprobs=np.empty((rows, listed)),
        )
        #: Number of leading rows of logits that were scored.
        self.known = 0

    @property
    def complete(self) -> bool:
        """True once every token but the first has its score."""
        return self.known == self._prompt.size - 1

    def wanted(self, position: int, rows: int) -> range:
        """Returns which of `rows` rows, from `position` on, are still to be scored: indexes from the first row."""
        begin = max(self.known - position, 0)
        return range(begin, max(begin, min(self._prompt.size - 1 - position, rows)))

    def add(self, rows: LogitRows, sampler: Sampler) -> None:
        """Scores the next rows of logits, those that `wanted` named."""
        begin, end = self.known, self.known + len(rows)
        targets = self._prompt[begin + 1 : end + 1].tolist()
        changes = [(np.array([target], np.int64), np.array([_CERTAIN])) for target in targets]
        draws = [Draw(row, self._params, 0, 0, change) for row, change in zip(rows, changes, strict=True)]
        found = self._found
        for at, (draw, one, target) in enumerate(zip(draws, sampler(draws), targets, strict=True), begin):
            assert one.logprob is not None and one.token == target, "the draw can give no other token"
            assert not isinstance(draw.row, Largest), "a score needs the whole row"
            found.logprobs[at], found.ranks[at] = one.logprob, _rank(draw.row, target)
            for place, (token, logprob) in enumerate(one.top):
                found.top_ids[at, place], found.top_logprobs[at, place] = token, logprob
        self.known = end

    def encode(self) -> str:
        """Returns all scores as the end of the request has them. The scores must be complete."""
        assert self.complete, "a token of the prompt has no score"
        return self._found.encode()


def _rank(row: NDArray[np.float32], token: int) -> int:
    """Returns the place of `token` among all tokens by their logits, from 1; of equal ones the lower id is first."""
    logit = row[token]
    return 1 + int(np.count_nonzero(row > logit)) + int(np.count_nonzero(row[:token] == logit))
