"""The arguments of ACCEPT for one request, as data. They are sent again if Redis loses the record."""

from dataclasses import dataclass, fields

from blockrelay.protocol.messages import RequestBody
from blockrelay.protocol.transitions import calls
from blockrelay.protocol.transitions.calls import NO_LIMITS, Accepted, Binding, Call, Limits, SessionStep

#: Stands for no limit: a request that was accepted once is never refused.
NO_LIMIT_OF_REQUESTS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The arguments of ACCEPT without its limits.

    `reader` is the id of the gateway that is registered as a reader of the log if the request exists already.
    """

    request_id: str
    body: RequestBody
    model: str  # the model's key in Redis
    pages_needed: int  # the most KV pages of one block that the request fills
    deadline_ms: int = 0  # Unix milliseconds of Redis' clock; 0: none
    fingerprint: str = ""  # identifies the client's body if it came with an idempotency key; "" without a key
    retention_s: int = 0  # seconds for which the ended request is kept; 0: as the cell says
    session: SessionStep | None = None  # for a step of a session
    tenant: str = ""  # the tenant's name; "" if API keys are off
    weight: float = 1.0  # the tenant's share of the workers, relative to other tenants' while they wait too
    priority: int = 0  # lower is claimed earlier
    reader: str = ""
    result_bytes: int = 0  # bytes of its tensor result on the payload Redis; 0 for tokens
    expected_tokens: int | None = None  # new tokens to account for; None: as many as max_tokens
    binding: Binding | None = None  # for a request with a key or session where there are several cells

    def call(
        self, *, max_in_flight: int = NO_LIMIT_OF_REQUESTS, limits: Limits = NO_LIMITS, confirm: bool = False
    ) -> Call[Accepted]:
        """The call of ACCEPT; the same request, seed and deadline each time, so the same tokens.

        `max_in_flight` is the limit on the cell's unfinished requests. `confirm`: Redis' WAIT follows the call, so it
        writes even if the request exists already.
        """
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return calls.accept(**own, max_in_flight=max_in_flight, limits=limits, confirm=confirm)
