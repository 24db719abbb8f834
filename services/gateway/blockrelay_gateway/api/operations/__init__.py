"""Routes about the gateway itself: models, plan, liveness, readiness, metrics."""
