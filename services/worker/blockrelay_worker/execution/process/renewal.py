"""The waiting times before a lost device is tried again and before a slow one gets a new process. Pure."""

from collections.abc import Sequence

#: Seconds to wait after the first, second and third loss within OF_LATE_S.
BACKOFF_S = (1.0, 5.0, 30.0)
#: MOST_LOSSES losses within OF_LATE_S seconds put a device in quarantine: it is tried once in QUARANTINE_S seconds.
MOST_LOSSES, OF_LATE_S, QUARANTINE_S = 3, 600.0, 3600.0

#: Seconds between two renewals of a process that was not lost: if one did not help, the next will not either.
RENEWALS_APART_S = 3600.0
#: Seconds between two tries to open a device that is here and cannot be used.
_OPENED_AGAIN_S = (*BACKOFF_S, 60.0)


def opened_again_in_s(failures: int) -> float:
    """Returns the seconds until the next try to open a device that could not be opened `failures` times (1 or more)."""
    return _OPENED_AGAIN_S[min(failures, len(_OPENED_AGAIN_S)) - 1]


def may_be_renewed(renewed: float | None, now: float) -> bool:
    """Returns whether the last renewal, at `renewed` (None: never), is RENEWALS_APART_S seconds ago or more."""
    return renewed is None or now - renewed >= RENEWALS_APART_S


def in_quarantine(losses: Sequence[float]) -> bool:
    """Returns whether the last MOST_LOSSES of `losses` (seconds, ascending) came within OF_LATE_S seconds."""
    return len(losses) >= MOST_LOSSES and losses[-1] - losses[-MOST_LOSSES] <= OF_LATE_S


def usable_in_s(losses: Sequence[float], now: float) -> float:
    """Returns the seconds from `now` until a device with these `losses` (seconds, ascending) may be tried; 0.0 at
    once."""
    if not losses:
        return 0.0
    late = sum(losses[-1] - loss <= OF_LATE_S for loss in losses)
    wait_s = QUARANTINE_S if in_quarantine(losses) else BACKOFF_S[min(late, len(BACKOFF_S)) - 1]
    return max(0.0, losses[-1] + wait_s - now)
