"""What bounds a batch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """At most `max_rows` rows; beside decoding requests a step lasts about `step_share_s` seconds.

    `guesses`: drafts are tried.
    """

    max_rows: int
    step_share_s: float
    guesses: bool
