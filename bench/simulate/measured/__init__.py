"""Runs real systems under load, and measures the simulator's costs on them."""
