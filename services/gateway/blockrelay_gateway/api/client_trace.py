"""What a client's headers say of traces."""

from collections.abc import Mapping
from dataclasses import dataclass

from blockrelay.errors import BadRequest
from blockrelay.observability.traceparent import clean_traceparent

#: As the field `trace` of a body, which wins.
HEADER = "Blockrelay-Trace"


@dataclass(frozen=True, slots=True)
class ClientTrace:
    """`traceparent`: the client's span, or "". `stages`: whether stages shall tell what they do for the request."""

    traceparent: str = ""
    stages: bool = False

    def traced(self, field: bool | None) -> bool:
        """`stages`, unless the body's `field` says."""
        return self.stages if field is None else field


#: Of a client that says nothing.
NO_TRACE = ClientTrace()


def client_trace(headers: Mapping[str, str]) -> ClientTrace:
    """Raises BadRequest for a HEADER that is neither true nor false."""
    said = headers.get(HEADER, "false").lower()
    if said not in ("true", "false"):
        raise BadRequest(f"{HEADER} is true or false, not {said!r:.40}", param=HEADER)
    return ClientTrace(clean_traceparent(headers.get("traceparent")), said == "true")
