"""Guesses at the next tokens (prompt lookup): what followed the last few tokens the last time they stood together.

A guess costs a row in a batch and never a token's bits: it is kept only where sampling gives the very same token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

#: Lengths of the token groups that are looked up, the longest first. Single tokens match anything and guess badly.
GROUPS = (4, 3, 2)
#: Draft tokens of one run in one step at most.
MOST = 8
#: Positions that the index of a run has: at least the first number behind a long prompt, at most twice as many. And how
#: many of them are noted in one step.
INDEXED, INDEXED_AT_ONCE = 2048, 256
#: Positions that are searched at once where there is no index.
SEARCHED = 8192
_BEFORE = GROUPS[0]
#: Steps that a run without success waits before it tries one draft again; doubled each time up to the second.
FIRST_PAUSE, LONGEST_PAUSE = 8, 128


def right_drafts(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of `drafts`, from the first on, `tokens` turned out to be; the last token is never a draft's."""
    count = 0
    for draft, token in zip(drafts, tokens[:-1], strict=False):
        if draft != token:
            break
        count += 1
    return count


class KnownTokens:
    """The tokens of a run in one array, which is searched without an index: microseconds for each thousand."""

    def __init__(self, first: Sequence[int] | NDArray[np.int32] = ()) -> None:
        """`first` are the first of them: quicker as an array."""
        self._count = len(first)
        self._array = np.full(_BEFORE + self._count + SEARCHED, -1, np.int32)  # behind _BEFORE that no token equals
        self._array[_BEFORE : _BEFORE + self._count] = first

    def add(self, tokens: Sequence[int]) -> None:
        """`tokens` are those from before and what came since."""
        if (needed := _BEFORE + len(tokens)) > len(self._array):
            self._array = np.concatenate([self._array, np.full(max(needed, len(self._array)), -1, np.int32)])
        if self._count < len(tokens):
            self._array[_BEFORE + self._count : needed] = tokens[self._count :]
            self._count = len(tokens)

    def search(self, begin: int, end: int) -> dict[int, int]:
        """For each size of a group the last position in begin..end-1 before which the last tokens stand, if any. Looks
        no further than where the largest group is found."""
        last = self._array[_BEFORE + self._count - GROUPS[0] : _BEFORE + self._count]
        found: dict[int, int] = {}
        for upper in range(end, begin, -SEARCHED):
            lower = max(begin, upper - SEARCHED)
            same: NDArray[np.bool_] = np.ones(upper - lower, np.bool_)
            for size in range(1, GROUPS[0] + 1):
                same &= self._array[_BEFORE + lower - size : _BEFORE + upper - size] == last[-size]
                if not same.any():
                    break
                if size in GROUPS and size not in found:
                    found[size] = lower + int(np.flatnonzero(same)[-1])
            if GROUPS[0] in found:
                break
        return found


@dataclass(slots=True)
class Drafter:
    """The drafts of one run: a pure function of the tokens and verdicts it was told, in order.

    The index knows the last tokens alone, and grows by a bounded number of them in each call: one for a long prompt
    would hold up everybody for a quarter of a second and take 50 MB. What it does not know is searched.
    """

    length: int = 2  # draft tokens to try next; 0: pausing
    known: KnownTokens = field(default_factory=KnownTokens)
    _pause: int = FIRST_PAUSE
    _wait: int = 0
    _begin: int = 0
    """The followers from here up to `_end` are in the index."""
    _end: int = 0
    _followers: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` guesses at what follows `tokens`; none while pausing. Counts as a step of the pause.

        `tokens` grew since the last call, if anything: earlier ones never change. Costs a few look-ups per new token.
        """
        if self.length == 0:
            self._wait -= 1
            if self._wait > 0:
                return []
            self.length = 1
        most = min(most, self.length)
        if most < 1:
            return []
        self.known.add(tokens)
        self._index(tokens)
        start = self._start(tokens)
        return [] if start is None else _copied(tokens, start, most)

    def verdict(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens the first `accepted` were right: longer drafts after success, shorter after failure."""
        if drafted == 0:
            return
        if accepted == drafted:
            self.length, self._pause = min(MOST, max(self.length, drafted) + 2), FIRST_PAUSE
        elif accepted * 2 < drafted:
            self.length = drafted // 2
        if self.length == 0:
            self._wait, self._pause = self._pause, min(LONGEST_PAUSE, 2 * self._pause)

    def _start(self, tokens: Sequence[int]) -> int | None:
        """Which position followed the last tokens the last time, as many of them as have been there before."""
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
        """Note for some groups of tokens which position followed it last; the group at the very end has none yet."""
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
    """`count` tokens from `start` on; where the known ones end, the copy goes on copying itself."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(count)]
