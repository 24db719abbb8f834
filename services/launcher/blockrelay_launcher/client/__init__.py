"""A client that survives what dies."""
