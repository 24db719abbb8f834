"""The metrics of a whole cell, which its scheduler computes: gauges, and the number of workers wanted."""
