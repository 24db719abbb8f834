"""The limits of a batch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from blockrelay.protocol.capabilities import Capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of one batch: at most `max_rows` rows of `max_sequences` requests."""

    max_rows: int
    max_sequences: int
    ragged: bool
    """Requests of a batch may differ in their numbers of tokens."""
    drafts: bool
    """Draft tokens are tried."""
    step_share_s: float
    """Seconds that a step with decode tokens should take."""
    chunk_s: float
    """Seconds that a step of prompt tokens alone may take."""

    def obeying(self, others: Iterable[Capabilities]) -> "BatchLimits":
        """Returns these limits, narrowed to what the other executors that compute the batch can do.

        Drafts need ragged batches, and executors whose bits do not depend on the batch.
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
