"""When to ask again."""

from random import uniform

#: Retry-After is between these, in seconds: clients that were refused together should not come back together.
SOONEST_S, LATEST_S, SPREAD = 1, 60, 1.5


def retry_after_s(wait_ms: int) -> int:
    """Whole seconds after which to ask again, about `wait_ms` and a little."""
    return round(min(LATEST_S, max(SOONEST_S, wait_ms / 1000)) * uniform(1, SPREAD))
