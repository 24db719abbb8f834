"""A simulator of whole systems: throughput and latency of any number of cells, from measured costs.

A simulated request takes the same steps as a real one (`docs/architecture.md`): ACCEPT, CLAIM, batches chosen by the
worker's own code, hops between stages, COMMIT, events of the gateway. Only the costs of `costs.py` take time.
"""
