"""Batches from the rows of runs, and from their results commits, messages to the next stage, or errors."""
