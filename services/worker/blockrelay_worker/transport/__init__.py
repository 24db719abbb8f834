"""A worker's traffic with Redis and other workers: events, rows between stages, commits, results."""
