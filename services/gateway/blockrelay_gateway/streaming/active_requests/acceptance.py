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

    `pages_needed` is the most KV pages of one block that the request fills. `deadline_ms` is Unix milliseconds of
    Redis' clock, 0: none. `retention_s` is the time in seconds for which the ended request is kept, 0: as the cell
    says. `reader` is the id of the gateway that is registered as a reader of the log if the request exists already.
    """

    request_id: str
    body: RequestBody
    model: str
    pages_needed: int
    deadline_ms: int = 0
    fingerprint: str = ""
    retention_s: int = 0
    session: SessionStep | None = None
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    reader: str = ""
    result_bytes: int = 0
    expected_tokens: int | None = None
    binding: Binding | None = None

    def call(
        self, *, max_in_flight: int = NO_LIMIT_OF_REQUESTS, limits: Limits = NO_LIMITS, confirm: bool = False
    ) -> Call[Accepted]:
        """The call of ACCEPT; the same request, seed and deadline each time, so the same tokens.

        `max_in_flight` is the limit on the cell's unfinished requests. `confirm`: WAIT follows.
        """
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return calls.accept(**own, max_in_flight=max_in_flight, limits=limits, confirm=confirm)
