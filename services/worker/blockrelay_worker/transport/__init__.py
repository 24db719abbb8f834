"""What comes from Redis and goes there: events, rows between stages, commits, results."""
