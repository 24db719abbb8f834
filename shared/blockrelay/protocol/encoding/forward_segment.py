"""The description of consecutive tokens of one request in a message between stages, without their hidden states."""

from dataclasses import dataclass
from typing import Any

from blockrelay.protocol.encoding.checks import count, flag, items, text, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSegment:
    """Consecutive tokens of one request inside a Forward."""

    request_id: str
    run_id: str
    sequence: int  # number of this message from the run to this target, from 0; the receiver expects last + 1
    position: int  # of the first token
    token_ids: tuple[int, ...]
    ends_known: bool  # the last known token is among them, so the last stage samples after it
    drafts: int = 0  # how many tokens at the end are drafts

    def to_list(self) -> list[Any]:
        """Returns the segment as a list for the head of a message."""
        token_ids = list(self.token_ids)
        return [self.request_id, self.run_id, self.sequence, self.position, token_ids, self.ends_known, self.drafts]

    @classmethod
    def from_list(cls, encoded: object) -> "ForwardSegment":
        """Reads the list of `to_list`. Call it inside `checks.reading`, which makes WireErrors."""
        request, run, sequence, position, token_ids, ends_known, drafts = items(encoded)
        return cls(
            request_id=text(request),
            run_id=text(run),
            sequence=count(sequence),
            position=count(position),
            token_ids=tokens(token_ids),
            ends_known=flag(ends_known),
            drafts=count(drafts),
        )
