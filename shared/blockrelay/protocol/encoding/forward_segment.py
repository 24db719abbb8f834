"""Consecutive rows of one request in a message between two stages: which they are, without the rows themselves."""

from dataclasses import dataclass
from typing import Any

from blockrelay.protocol.encoding.checks import count, flag, items, text, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSegment:
    """Consecutive rows of one request inside a Forward."""

    request: str
    run: str
    sequence: int  # messages of this run to this target, from 0: the receiver takes last + 1
    position: int  # of the first row
    token_ids: tuple[int, ...]  # one per row
    ends_known: bool  # the last known token is among them: sample there
    drafts: int = 0  # rows at the end whose tokens are guesses

    def to_list(self) -> list[Any]:
        """The segment as the head of a message has it."""
        token_ids = list(self.token_ids)
        return [self.request, self.run, self.sequence, self.position, token_ids, self.ends_known, self.drafts]

    @classmethod
    def from_list(cls, said: object) -> "ForwardSegment":
        """Raises WireError, or what `checks.reading` makes one of."""
        request, run, sequence, position, token_ids, ends_known, drafts = items(said)
        return cls(
            request=text(request),
            run=text(run),
            sequence=count(sequence),
            position=count(position),
            token_ids=tokens(token_ids),
            ends_known=flag(ends_known),
            drafts=count(drafts),
        )
