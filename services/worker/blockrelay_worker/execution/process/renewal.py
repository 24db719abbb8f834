"""When a device that was lost may be tried again, and one that is slow be given a new process. Pure."""

from collections.abc import Sequence

#: Seconds behind the first, second and third loss of late.
BACKOFF_S = (1.0, 5.0, 30.0)
#: So many losses in so long put a device in quarantine, where it is tried this rarely. Seconds.
MOST_LOSSES, OF_LATE_S, QUARANTINE_S = 3, 600.0, 3600.0

#: Between two renewals of a process that was not lost: what did not help need not be done again soon. Seconds.
RENEWALS_APART_S = 3600.0
#: Seconds between two tries to open a device that is here and cannot be used.
_OPENED_AGAIN_S = (*BACKOFF_S, 60.0)


def opened_again_in_s(failures: int) -> float:
    """Seconds until a device is tried again that could so often not be opened, once at least."""
    return _OPENED_AGAIN_S[min(failures, len(_OPENED_AGAIN_S)) - 1]


def may_be_renewed(renewed: float | None, now: float) -> bool:
    """By the time of the last renewal."""
    return renewed is None or now - renewed >= RENEWALS_APART_S


def in_quarantine(losses: Sequence[float]) -> bool:
    """By the times of all losses, in order: the last so many came within so long."""
    return len(losses) >= MOST_LOSSES and losses[-1] - losses[-MOST_LOSSES] <= OF_LATE_S


def usable_in_s(losses: Sequence[float], now: float) -> float:
    """Seconds until it may be tried; 0.0 at once."""
    if not losses:
        return 0.0
    late = sum(losses[-1] - loss <= OF_LATE_S for loss in losses)
    wait_s = QUARANTINE_S if in_quarantine(losses) else BACKOFF_S[min(late, len(BACKOFF_S)) - 1]
    return max(0.0, losses[-1] + wait_s - now)
