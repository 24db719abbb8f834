"""Drafts tokens by prompt lookup: copies what followed the last few tokens at their previous occurrence.

A draft costs a row of a batch, and never changes a token: it is kept only if sampling chooses the same token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from blockrelay.protocol.constants import MAX_DRAFTS

#: Lengths (in tokens) of the n-grams that are looked up, longest first. Single tokens match too much and draft badly.
GROUPS = (4, 3, 2)
#: Last positions that a run's index covers, up to twice as many; and the maximum that one step adds to it.
INDEXED, INDEXED_AT_ONCE = 2048, 256
#: Positions per chunk of a search without index.
SEARCHED = 8192
_BEFORE = GROUPS[0]
#: Steps without drafts after failure, before one draft is tried again; doubled after each failure up to the maximum.
FIRST_PAUSE, LONGEST_PAUSE = 8, 128


def right_drafts(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Number of leading `drafts` that equal the chosen `tokens`; the last token was sampled behind the drafts."""
    count = 0
    for draft, token in zip(drafts, tokens[:-1], strict=False):
        if draft != token:
            break
        count += 1
    return count


class KnownTokens:
    """The tokens of a run in one array, for search without an index: microseconds per thousand tokens."""

    def __init__(self, first: Sequence[int] | NDArray[np.int32] = ()) -> None:
        """`first` are the tokens known so far: faster as an array."""
        self._count = len(first)
        # The first _BEFORE entries equal no token, so that a search needs no check of its bounds.
        self._array = np.full(_BEFORE + self._count + SEARCHED, -1, np.int32)
        self._array[_BEFORE : _BEFORE + self._count] = first

    def add(self, tokens: Sequence[int]) -> None:
        """Appends new tokens. `tokens` are all of the run: the known ones first, unchanged."""
        if (needed := _BEFORE + len(tokens)) > len(self._array):
            self._array = np.concatenate([self._array, np.full(max(needed, len(self._array)), -1, np.int32)])
        if self._count < len(tokens):
            self._array[_BEFORE + self._count : needed] = tokens[self._count :]
            self._count = len(tokens)

    def search(self, begin: int, end: int) -> dict[int, int]:
        """Finds earlier occurrences of the last n tokens, for each n in GROUPS.

        Returns by n the last position in `begin` to `end` - 1 that follows one; no entry without any. Stops at the
        chunk in which the longest n-gram occurs. 0 <= `begin`, and `end` is at most the number of known tokens. An
        entry for an n beyond that number means nothing.
        """
        last = self._array[_BEFORE + self._count - GROUPS[0] : _BEFORE + self._count]
        followers: dict[int, int] = {}
        for upper in range(end, begin, -SEARCHED):
            lower = max(begin, upper - SEARCHED)
            same: NDArray[np.bool_] = np.ones(upper - lower, np.bool_)
            for size in range(1, GROUPS[0] + 1):
                same &= self._array[_BEFORE + lower - size : _BEFORE + upper - size] == last[-size]
                if not same.any():
                    break
                if size in GROUPS and size not in followers:
                    followers[size] = lower + int(np.flatnonzero(same)[-1])
            if GROUPS[0] in followers:
                break
        return followers


@dataclass(slots=True)
class Drafter:
    """Makes the drafts of one run: a pure function of the tokens and verdicts so far, in order.

    Its index covers the last tokens only, and grows by a bounded number in each call: an index of a long prompt would
    delay all requests by a quarter of a second and take 50 MB. Tokens outside the index are searched.
    """

    length: int = 2  # number of draft tokens to try next; 0: pausing
    known: KnownTokens = field(default_factory=KnownTokens)
    _pause: int = FIRST_PAUSE
    _wait: int = 0
    _begin: int = 0
    """The index covers positions from here up to `_end`."""
    _end: int = 0
    _followers: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])
    """The index: for each n-gram the last position that follows it."""

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Returns at most `limit` draft tokens to follow `tokens`; none during a pause, of which a call is one step.

        `tokens` may have grown since the last call, and must not have changed otherwise. Costs a few look-ups per new
        token.
        """
        if self.length == 0:
            self._wait -= 1
            if self._wait > 0:
                return []
            self.length = 1
        limit = min(limit, self.length)
        if limit < 1:
            return []
        self.known.add(tokens)
        self._index(tokens)
        start = self._start(tokens)
        return [] if start is None else _copied(tokens, start, limit)

    def verdict(self, drafted: int, accepted: int) -> None:
        """Adapts the draft length: the first `accepted` of `drafted` tokens were right.

        Longer drafts follow if all were, shorter ones or a pause if fewer than half were.
        """
        if drafted == 0:
            return
        if accepted == drafted:
            self.length, self._pause = min(MAX_DRAFTS, max(self.length, drafted) + 2), FIRST_PAUSE
        elif accepted * 2 < drafted:
            self.length = drafted // 2
        if self.length == 0:
            self._wait, self._pause = self._pause, min(LONGEST_PAUSE, 2 * self._pause)

    def _start(self, tokens: Sequence[int]) -> int | None:
        """The position behind the previous occurrence of the last tokens, of the longest n-gram that has one."""
        known = len(tokens)
        newest = self.known.search(self._end, known) if self._end < known else {}
        oldest: dict[int, int] | None = None
        for size in GROUPS:
            if known < size:
                continue
            start = newest.get(size) or self._followers.get(tuple(tokens[known - size :]))
            if start is None and self._begin:
                oldest = self.known.search(0, self._begin) if oldest is None else oldest
                start = oldest.get(size)
            if start is not None:
                return start
        return None

    def _index(self, tokens: Sequence[int]) -> None:
        """Adds up to INDEXED_AT_ONCE positions to the index; drops it if it has grown beyond 2 x INDEXED positions.

        The last tokens themselves are not in it: nothing follows them yet.
        """
        known = len(tokens)
        if known - self._begin > 2 * INDEXED:
            self._followers.clear()
            self._begin = self._end = known - INDEXED
        end = min(known, self._end + INDEXED_AT_ONCE)
        for follower in range(max(self._end, GROUPS[-1]), end):
            for size in GROUPS:
                if follower >= size:
                    self._followers[tuple(tokens[follower - size : follower])] = follower
        self._end = end


def _copied(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Copies `count` tokens from `start` on; behind the last known one the copy repeats itself."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(count)]
