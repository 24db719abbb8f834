"""The planning strategies: pure functions from a `Problem` to a `Placement`, one in each file, listed in `registry`."""
