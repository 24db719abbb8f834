"""Guesses at the next tokens (prompt lookup): what followed the last few tokens the last time they stood together.

A guess costs a row in a batch and never a token's bits: it is kept only where sampling gives the very same token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

#: Lengths of the token groups that are looked up, the longest first. Single tokens match anything and guess badly.
GROUPS = (4, 3, 2)
#: Draft tokens of one run in one step at most.
MOST = 8
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


@dataclass(slots=True)
class Drafter:
    """The drafts of one run: a pure function of the tokens and verdicts it was told, in order."""

    length: int = 2  # draft tokens to try next; 0: pausing
    _pause: int = FIRST_PAUSE
    _wait: int = 0
    _indexed: int = 0
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
        self._index(tokens)
        known = len(tokens)
        for size in GROUPS:
            start = self._followers.get(tuple(tokens[known - size :])) if known >= size else None
            if start is not None:
                return _copied(tokens, start, most)
        return []

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

    def _index(self, tokens: Sequence[int]) -> None:
        """Note for each group of tokens which position followed it last; the group at the very end has none yet."""
        for follower in range(max(self._indexed, GROUPS[-1]), len(tokens)):
            for size in GROUPS:
                if follower >= size:
                    self._followers[tuple(tokens[follower - size : follower])] = follower
        self._indexed = len(tokens)


def _copied(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; where the known ones end, the copy goes on copying itself."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(count)]
