"""What a client's headers say of how its request shall be run; fields of the body of the same meaning win."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast, get_args

from blockrelay.errors import BadRequest
from blockrelay.observability.traceparent import clean_traceparent
from blockrelay.protocol.messages import Fallback
from blockrelay_gateway.api.common_schemas import SamplingFields

#: As the fields `trace`, `exact` and `fallback` of a body.
TRACE, EXACT, FALLBACK = "Blockrelay-Trace", "Blockrelay-Exact", "Blockrelay-Fallback"
#: Fields that change nothing are refused.
STRICT = "Blockrelay-Strict"


@dataclass(frozen=True, slots=True)
class ClientHeaders:
    """`traceparent`: the client's span, or "". `trace`: whether stages shall tell what they do for the request. `exact`
    and `fallback`: as in RequestBody. `strict`: refuse fields that change nothing."""

    traceparent: str = ""
    trace: bool = False
    exact: bool = False
    fallback: Fallback = "allow"
    strict: bool = False

    def traced(self, fields: SamplingFields) -> bool:
        return self.trace if fields.trace is None else fields.trace

    def is_exact(self, fields: SamplingFields) -> bool:
        return self.exact if fields.exact is None else fields.exact

    def fallback_of(self, fields: SamplingFields) -> Fallback:
        return fields.fallback or self.fallback


#: Of a client that says nothing.
NO_HEADERS = ClientHeaders()


def client_headers(headers: Mapping[str, str]) -> ClientHeaders:
    """Raises BadRequest, naming the header, for a value that it cannot have."""
    return ClientHeaders(
        traceparent=clean_traceparent(headers.get("traceparent")),
        trace=_one_of(headers, TRACE, "false", ("true", "false")) == "true",
        exact=_one_of(headers, EXACT, "false", ("true", "false")) == "true",
        strict=_one_of(headers, STRICT, "false", ("true", "false")) == "true",
        fallback=cast(Fallback, _one_of(headers, FALLBACK, "allow", get_args(Fallback))),
    )


def _one_of(headers: Mapping[str, str], name: str, usual: str, allowed: tuple[str, ...]) -> str:
    said = headers.get(name, usual).lower()
    if said not in allowed:
        raise BadRequest(f"{name} is {', '.join(allowed[:-1])} or {allowed[-1]}, not {said!r:.40}", param=name)
    return said
