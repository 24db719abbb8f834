"""The headers of a client that decide how its request runs; fields of the body with the same meaning win."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

from blockrelay.errors import BadRequest
from blockrelay.observability.traceparent import clean_traceparent
from blockrelay.protocol.encoding.fallback_policy import Fallback, limited_to
from blockrelay_gateway.api.common_schemas import MaxSlowdown, SamplingFields
from blockrelay_gateway.policy import KEPT_S

#: The headers that stand for the fields `trace`, `exact` and `fallback` of a body.
TRACE, EXACT, FALLBACK = "Blockrelay-Trace", "Blockrelay-Exact", "Blockrelay-Fallback"
#: With "true", fields that would change nothing are refused instead of ignored.
STRICT = "Blockrelay-Strict"
#: Preferences of a client (RFC 7240), of which `wait` counts here: seconds to wait for room in a full system.
PREFER = "Prefer"
_PREFERENCE = re.compile(r'(?:[^",]|"(?:\\.|[^"\\])*"?)+')
#: The form of `Blockrelay-Fallback` with a limit.
_LIMIT = re.compile(r"max_slowdown\s*=\s*([0-9.e+-]{1,40})", re.ASCII)
_WAIT = re.compile(r'wait\s*=\s*(?:(\d+)|"(\d+)")', re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ClientHeaders:
    """The checked headers of one request."""

    traceparent: str = ""
    """The client's span (W3C trace context), or ""."""
    trace: bool = False
    """Stages record their steps for the request."""
    exact: bool = False
    """Only deterministic devices compute the request, and it never continues under another numerics id."""
    fallback: str = "allow"
    """The policy for a GPU that fails, as `blockrelay.protocol.encoding.fallback_policy` writes it."""
    strict: bool = False
    """Fields that would change nothing are refused."""

    def traced(self, fields: SamplingFields) -> bool:
        """True if stages record their steps; the body's `trace` wins over the header."""
        return self.trace if fields.trace is None else fields.trace

    def is_exact(self, fields: SamplingFields) -> bool:
        """True if only deterministic devices may compute the request; the body's `exact` wins over the header."""
        return self.exact if fields.exact is None else fields.exact

    def fallback_of(self, fields: SamplingFields) -> str:
        """The policy for a device that fails; the body's `fallback` wins over the header."""
        if isinstance(fields.fallback, MaxSlowdown):
            return limited_to(fields.fallback.max_slowdown)
        return fields.fallback or self.fallback


def client_headers(headers: Mapping[str, str]) -> ClientHeaders:
    """Reads the headers of a request; `headers` must find names in upper and lower case alike, as Starlette's do.

    The case of values does not matter either. Raises BadRequest, naming the header, if a `Blockrelay-...` header has a
    value that is not allowed. A malformed `traceparent` counts as absent.
    """
    return ClientHeaders(
        traceparent=clean_traceparent(headers.get("traceparent")),
        trace=_one_of(headers, TRACE, "false", ("true", "false")) == "true",
        exact=_one_of(headers, EXACT, "false", ("true", "false")) == "true",
        strict=_one_of(headers, STRICT, "false", ("true", "false")) == "true",
        fallback=_fallback(headers.get(FALLBACK, "allow").lower()),
    )


def _fallback(value: str) -> str:
    """The policy that the header `Blockrelay-Fallback` asks for, in lower case: a word, or `max_slowdown=2.0`."""
    if value in get_args(Fallback):
        return value
    if found := _LIMIT.fullmatch(value.strip()):
        with suppress(ValueError):
            return limited_to(float(found[1]))
    words = ", ".join(get_args(Fallback))
    raise BadRequest(
        f"{FALLBACK} is {words} or max_slowdown=NUMBER with a number above 0, not {value!r:.40}", param=FALLBACK
    )


def _one_of(headers: Mapping[str, str], name: str, usual: str, allowed: tuple[str, ...]) -> str:
    value = headers.get(name, usual).lower()
    if value not in allowed:
        raise BadRequest(f"{name} is {', '.join(allowed[:-1])} or {allowed[-1]}, not {value!r:.40}", param=name)
    return value


def wanted_wait_s(preferences: Sequence[str]) -> float:
    """Returns the seconds that a client wants to wait for room, at most KEPT_S; 0.0 without `wait`.

    `preferences` are the values of all its headers `Prefer`. The first `wait` counts, and other preferences are
    ignored (RFC 7240). Raises BadRequest if it is not a whole number.
    """
    for one in _PREFERENCE.findall(",".join(preferences)):
        preference = one.partition(";")[0].strip()
        if preference.partition("=")[0].strip().lower() != "wait":
            continue
        if found := _WAIT.fullmatch(preference):
            return min(float(found[1] or found[2]), KEPT_S)
        cause = f"{PREFER}: wait=SECONDS takes a whole number of seconds, not {preference!r:.40}"
        raise BadRequest(cause, param=PREFER)
    return 0.0
