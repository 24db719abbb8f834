"""The waiting times before a lost device is tried again and before a slow one gets a new process. Pure."""

from collections.abc import Sequence

from blockrelay_worker.policy import BACKOFF_S, MAX_LOSSES, OF_LATE_S, OPENED_AGAIN_S, QUARANTINE_S, RENEWALS_APART_S


def opened_again_in_s(failures: int) -> float:
    """Returns the seconds until the next try to open a device that could not be opened `failures` times (1 or more)."""
    return OPENED_AGAIN_S[min(failures, len(OPENED_AGAIN_S)) - 1]


def may_be_renewed(renewed: float | None, now: float) -> bool:
    """Returns whether the last renewal, at `renewed` (None: never), is RENEWALS_APART_S seconds before `now` or more.

    Both are seconds of one clock.
    """
    return renewed is None or now - renewed >= RENEWALS_APART_S


def in_quarantine(losses: Sequence[float]) -> bool:
    """Returns whether the last MAX_LOSSES of `losses` (seconds, ascending) came within OF_LATE_S seconds."""
    return len(losses) >= MAX_LOSSES and losses[-1] - losses[-MAX_LOSSES] <= OF_LATE_S


def usable_in_s(losses: Sequence[float], now: float) -> float:
    """Returns the seconds from `now` until a device with these `losses` (seconds, ascending) may be tried; 0.0 at
    once."""
    if not losses:
        return 0.0
    late = sum(losses[-1] - loss <= OF_LATE_S for loss in losses)
    wait_s = QUARANTINE_S if in_quarantine(losses) else BACKOFF_S[min(late, len(BACKOFF_S)) - 1]
    return max(0.0, losses[-1] + wait_s - now)
