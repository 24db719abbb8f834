"""The exact executor: it computes a stage in this process, on CPUs."""
