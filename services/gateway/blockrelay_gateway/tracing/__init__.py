"""What trace servers are told: the spans of each request, derived from its record at its end (docs/tracing.md)."""
