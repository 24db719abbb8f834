"""Rows of runs: into batches, and from what came of them to commits, to the next stage, or to an end."""
