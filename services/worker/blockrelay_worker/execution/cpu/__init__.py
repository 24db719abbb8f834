"""The exact executor on a CPU."""
