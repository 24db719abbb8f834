"""Decides which requests are refused unread, so that the refusals of a flood leave the cores to answers. Pure."""

from dataclasses import dataclass

from blockrelay.errors import LimitExceeded
from blockrelay_gateway.policy import FULL_REFUSALS_AT_ONCE, FULL_REFUSALS_PER_S, LEAST_FULL_REFUSALS_PER_S


@dataclass(slots=True)
class _Account:
    """What one tenant had left at the time `at`, in refusals of small bodies, and its last refusal."""

    level: float
    at: float
    last: LimitExceeded


class RefusalBudget:
    """Says when a tenant's requests are refused without being read, because too many were read and refused.

    Each tenant has a token bucket of FULL_REFUSALS_AT_ONCE, which fills by FULL_REFUSALS_PER_S shared among the tenants
    whose buckets are not full, at least by LEAST_FULL_REFUSALS_PER_S. A tenant without refusals is always read,
    whatever others do. Times are seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}  # the one charged last is the last

    def charge(self, tenant: str, refusal: LimitExceeded, now: float, *, cost: float = 1) -> None:
        """Counts a request of `tenant` that was read and refused; `cost` is 1 for a small body."""
        self._forget(now)
        account = self._accounts.pop(tenant, None) or _Account(FULL_REFUSALS_AT_ONCE, now, refusal)
        self._accounts[tenant] = account
        account.level, account.at, account.last = self._level(account, now) - cost, now, refusal

    def reason(self, tenant: str, now: float) -> LimitExceeded | None:
        """The tenant's last refusal if its next request is refused unread; None if the request is to be read."""
        account = self._accounts.get(tenant)
        return None if account is None or self._level(account, now) > 0 else account.last

    def _per_s(self) -> float:
        return max(FULL_REFUSALS_PER_S / len(self._accounts), LEAST_FULL_REFUSALS_PER_S)

    def _level(self, account: _Account, now: float) -> float:
        """What is in a bucket. A debt is at most what it gains in a second, so that each tenant is read again soon."""
        per_s = self._per_s()
        return min(FULL_REFUSALS_AT_ONCE, max(account.level, -per_s) + (now - account.at) * per_s)

    def _forget(self, now: float) -> None:
        """Drops full buckets, as long as the one that was charged first is full."""
        while self._accounts:
            tenant, account = next(iter(self._accounts.items()))
            if self._level(account, now) < FULL_REFUSALS_AT_ONCE:
                break
            del self._accounts[tenant]
