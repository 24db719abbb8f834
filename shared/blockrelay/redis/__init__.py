"""Redis clients, connections and errors, the Redis users, and direct reads of a cell's data."""
