"""A gateway's metrics by tenant, which is the name of an API key. `GET /metrics/tenants` serves them."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric, Summary

from blockrelay.observability.metrics.gateway import CLIENT_LIMITS, SHARED_LIMIT
from blockrelay.observability.metrics.instruments import Instruments

#: The label `tenant` of clients without a key. No key has such a name: names are of small letters.
ANYBODY = "ANYBODY"


class TenantMetrics:
    """Counts requests and tokens of each tenant, in a registry of its own.

    Methods take the tenant's name from the key file; the empty name, of clients without a key, becomes ANYBODY.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        make = Instruments(registry)
        self._requests = make.counter(
            "blockrelay_tenant_accepted_requests", "Accepted requests of this API key", "tenant"
        )
        self._prompt_tokens = make.counter(
            "blockrelay_tenant_prompt_tokens", "Prompt tokens of accepted requests of this API key", "tenant"
        )
        self._generation_tokens = make.counter(
            "blockrelay_tenant_generation_tokens", "Tokens generated for this API key", "tenant"
        )
        self._limited = make.counter(
            "blockrelay_tenant_limited",
            "Requests of this API key that a limit refused, or let wait (`Prefer: wait`), by limit",
            "tenant",
            "limit",
        )
        self._first_token = Summary(
            "blockrelay_tenant_time_to_first_token_seconds",
            "Time from the acceptance of a request of this API key to its first token",
            ["tenant"],
            registry=registry,
        )

    def expect(self, tenants: Iterable[str]) -> None:
        """Creates the series of `tenants`, at 0."""
        for tenant in tenants:
            name = tenant or ANYBODY
            for instrument in (self._requests, self._prompt_tokens, self._generation_tokens, self._first_token):
                instrument.labels(name)
            for limit in (*CLIENT_LIMITS, SHARED_LIMIT):
                self._limited.labels(name, limit)

    def accepted(self, tenant: str, prompt_tokens: int) -> None:
        """Counts an accepted request of `tenant` and its prompt tokens."""
        self._requests.labels(tenant or ANYBODY).inc()
        self._prompt_tokens.labels(tenant or ANYBODY).inc(prompt_tokens)

    def limited(self, tenant: str, limit: str) -> None:
        """Counts a request of `tenant` that `limit`, one of CLIENT_LIMITS or SHARED_LIMIT, refused or made wait."""
        self._limited.labels(tenant or ANYBODY, limit).inc()

    def first_token(self, tenant: str, seconds: float) -> None:
        """Counts the first token of a request of `tenant`, `seconds` after its acceptance."""
        self._first_token.labels(tenant or ANYBODY).observe(seconds)

    def tokens(self, tenant: str, count: int = 1) -> None:
        """Counts `count` tokens generated for `tenant`."""
        self._generation_tokens.labels(tenant or ANYBODY).inc(count)


class OneTenant(CollectorRegistry):
    """A view of the registry `of` that has only the samples of one tenant."""

    def __init__(self, of: CollectorRegistry, tenant: str) -> None:
        """`tenant`: the value of the label `tenant`."""
        super().__init__()
        self._of, self._tenant = of, tenant

    def collect(self) -> Iterable[Metric]:
        """Reads all metrics and yields each with the samples of the tenant."""
        for family in self._of.collect():
            family.samples = [sample for sample in family.samples if sample.labels.get("tenant") == self._tenant]
            yield family
