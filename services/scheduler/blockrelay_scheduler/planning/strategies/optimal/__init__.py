"""Strategy `auto`: the best plan, found by exact search."""
