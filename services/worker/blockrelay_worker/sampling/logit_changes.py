"""The logits that a request changes before a token is drawn: a pure function of the row, its parameters and its tokens.

In float64 and in this order:

1. `logit_bias` is added;
2. `repetition_penalty` divides the logits above 0 of all tokens so far, and multiplies the other ones of theirs;
3. `frequency_penalty`, times how often a token was generated, is subtracted;
4. `presence_penalty` is subtracted for each token that was generated;
5. tokens that may not follow get minus infinity: those that would end the answer before `min_tokens`, and those that
   would complete one of `bad_words`.

The order and the formulas are those of vLLM and of OpenAI's API.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from blockrelay.protocol.sampling_params import SamplingParams
from blockrelay_worker.kernels.arguments import F32, F64, I64

#: Different tokens for which there is room at first.
_ROOM = 64


class TokenCounts:
    """The different tokens of a request, and how often each of them was generated. Not thread-safe."""

    def __init__(self, tokens: Sequence[int], prompt_length: int) -> None:
        """Counts `tokens`, of which the first `prompt_length` are the prompt."""
        self._prompt_length, self._place, self._first = prompt_length, dict[int, int](), list[int]()
        self._ids, self._times = np.empty(_ROOM, np.int64), np.zeros(_ROOM, np.int64)
        #: Number of tokens that were counted.
        self.length = 0
        self.add(tokens)

    @property
    def generated(self) -> int:
        """Number of tokens that were generated."""
        return max(0, self.length - self._prompt_length)

    @property
    def ids(self) -> I64:
        """The different tokens in the order in which they came, int64 [n]. A view that later calls change."""
        return self._ids[: len(self._place)]

    @property
    def times(self) -> I64:
        """How often each of `ids` was generated, int64 [n]: 0 for tokens of the prompt alone. A view as well."""
        return self._times[: len(self._place)]

    def add(self, tokens: Iterable[int]) -> None:
        """Counts the tokens that follow."""
        for token in tokens:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._first):
                self._first.append(self.length)
                if place == self._ids.size:
                    self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                    self._times = np.concatenate([self._times, np.zeros_like(self._times)])
                self._ids[place], self._times[place] = token, 0
            self._times[place] += self.length >= self._prompt_length
            self.length += 1

    def take_back(self, tokens: Sequence[int]) -> None:
        """Undoes the last `add` of these tokens, which were generated."""
        for token in reversed(tokens):
            place = self._place[token]
            self._times[place] -= 1
            self.length -= 1
            if self._first[place] == self.length:  # it came first with these, and is the last of all
                del self._place[token]
                self._first.pop()


def changes_of(
    row: F32, params: SamplingParams, counts: TokenCounts, tokens: Sequence[int], end_ids: Iterable[int]
) -> tuple[I64, F64]:
    """Returns the tokens whose logits change, ascending, int64 [n], and their logits for this draw, float64 [n].

    `row` has all logits, `counts` those of `tokens`: the request's tokens so far. `end_ids` are the tokens that end it.
    All ids are below the size of the row. Changes that leave a logit as it is are among them.
    """
    seen, times = counts.ids, counts.times
    biased = np.array([token for token, _ in params.logit_bias], np.int64)
    forbidden = np.array(sorted(_forbidden(params, counts.generated, tokens, end_ids)), np.int64)
    is_penalised = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    ids = np.unique(np.concatenate([biased, forbidden, seen if is_penalised else seen[:0]]))
    values = row[ids].astype(np.float64)
    values[np.searchsorted(ids, biased)] += np.array([bias for _, bias in params.logit_bias])
    if is_penalised:
        places = np.searchsorted(ids, seen)
        before, penalty = values[places], params.repetition_penalty
        after = np.where(before > 0, before / penalty, before * penalty)
        after = after - params.frequency_penalty * times
        values[places] = np.where(times > 0, after - params.presence_penalty, after)
    values[np.searchsorted(ids, forbidden)] = -np.inf
    return ids, values


def _forbidden(params: SamplingParams, generated: int, tokens: Sequence[int], end_ids: Iterable[int]) -> set[int]:
    """Returns the tokens that may not follow."""
    forbidden = set(end_ids) if generated < params.min_tokens else set[int]()
    for *beginning, last in params.bad_words:
        count = len(beginning)
        if count <= generated and list(tokens[len(tokens) - count :]) == beginning:
            forbidden.add(last)
    return forbidden
