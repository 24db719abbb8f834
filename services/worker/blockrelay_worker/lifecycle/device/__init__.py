"""The device of a worker that computes in a process of its own."""
