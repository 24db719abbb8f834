"""From float weights to integers."""
