"""What a gateway tells of each API key, to those who may know (`GET /metrics/tenants`)."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Metric, Summary

from blockrelay.observability.metrics.gateway import CLIENT_LIMITS, SHARED_LIMIT

#: The label `tenant` of clients without a key. No key has such a name: names are of small letters.
ANYBODY = "ANYBODY"


class TenantMetrics:
    """By the name of the key, from the file of keys. `registry` holds nothing else."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def by_tenant(name: str, text: str, *more: str) -> Counter:
            return Counter(f"blockrelay_tenant_{name}", text, ["tenant", *more], registry=registry)

        self._requests = by_tenant("accepted_requests", "How many requests of this API key were accepted")
        self._prompt_tokens = by_tenant("prompt_tokens", "How many prompt tokens of it were accepted")
        self._generation_tokens = by_tenant("generation_tokens", "How many tokens were relayed to it")
        self._limited = by_tenant("limited", "How many of its requests were refused by a limit", "limit")
        self._first_token = Summary(
            "blockrelay_tenant_time_to_first_token_seconds",
            "How long its requests waited from ACCEPT to token 1",
            ["tenant"],
            registry=registry,
        )

    def expect(self, tenants: Iterable[str]) -> None:
        """There are these: their series begin."""
        for tenant in tenants:
            name = tenant or ANYBODY
            for instrument in (self._requests, self._prompt_tokens, self._generation_tokens, self._first_token):
                instrument.labels(name)
            for limit in (*CLIENT_LIMITS, SHARED_LIMIT):
                self._limited.labels(name, limit)

    def accepted(self, tenant: str, prompt_tokens: int) -> None:
        """A request of it."""
        self._requests.labels(tenant or ANYBODY).inc()
        self._prompt_tokens.labels(tenant or ANYBODY).inc(prompt_tokens)

    def limited(self, tenant: str, limit: str) -> None:
        """A request of it was refused."""
        self._limited.labels(tenant or ANYBODY, limit).inc()

    def first_token(self, tenant: str, seconds: float) -> None:
        """Of one of its requests, so long after ACCEPT."""
        self._first_token.labels(tenant or ANYBODY).observe(seconds)

    def tokens(self, tenant: str, count: int = 1) -> None:
        """So many more were relayed."""
        self._generation_tokens.labels(tenant or ANYBODY).inc(count)


class OneTenant(CollectorRegistry):
    """What `of` tells of one tenant, and of no other."""

    def __init__(self, of: CollectorRegistry, tenant: str) -> None:
        super().__init__()
        self._of, self._tenant = of, tenant

    def collect(self) -> Iterable[Metric]:
        """All metrics, freshly read."""
        for family in self._of.collect():
            family.samples = [sample for sample in family.samples if sample.labels.get("tenant") == self._tenant]
            yield family
