"""Commands that run a model in one process, without a queue."""
