"""Models, liveness, readiness, metrics."""
