"""A device in a process of its own: what a driver does to it, a worker outlives."""
