"""`auto`: the best plan, by exact search."""
