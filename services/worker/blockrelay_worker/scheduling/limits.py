"""What bounds a batch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from blockrelay.protocol.capabilities import Capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """At most `max_rows` rows of `max_sequences` requests; all with the same number of rows unless it may be `ragged`.

    Beside decoding requests a step lasts about `step_share_s` seconds, one of prompts alone at most `chunk_s`.
    `drafts`: guessed tokens are tried.
    """

    max_rows: int
    max_sequences: int
    ragged: bool
    drafts: bool
    step_share_s: float
    chunk_s: float

    def obeying(self, others: Iterable[Capabilities]) -> "BatchLimits":
        """These limits where the rows of a batch go through executors of such capabilities too.

        Drafts make rows that may differ in number, and are only tried where a row's bits do not depend on its batch.
        """
        all_of = list(others)
        ragged = self.ragged and all(one.ragged for one in all_of)
        return replace(
            self,
            max_rows=min([self.max_rows, *(one.max_rows for one in all_of)]),
            max_sequences=min([self.max_sequences, *(one.max_sequences for one in all_of)]),
            ragged=ragged,
            drafts=self.drafts and ragged and all(one.exact for one in all_of),
        )
