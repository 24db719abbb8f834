"""Reads from OpenTelemetry's variables if traces are wanted."""

import os
import re

from blockrelay.errors import UsageError


def traces_wanted() -> bool:
    """True if OpenTelemetry's variables name a trace server and do not turn traces off.

    The SDK reads the other variables (docs/observability.md).

    Raises UsageError, one line, for an endpoint that is no URL and for a protocol that is not supported.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    for_traces = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    endpoint = for_traces or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not endpoint:
        return False
    if not re.match(r"https?://[^/]", endpoint):
        name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" if for_traces else "OTEL_EXPORTER_OTLP_ENDPOINT"
        raise UsageError(f"{name}: {endpoint} is not a URL such as http://127.0.0.1:4318")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        raise UsageError(f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol} is not supported, only http/protobuf is")
    return True
