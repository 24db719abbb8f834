"""KV pages: the pool, their names, what is shared and kept."""
