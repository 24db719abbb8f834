"""Commands that run or inspect a model in one process, without services or a queue."""
