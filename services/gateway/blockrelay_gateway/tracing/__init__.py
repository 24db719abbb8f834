"""Traces of requests: spans that are derived from a request's record at its end (docs/observability.md)."""
