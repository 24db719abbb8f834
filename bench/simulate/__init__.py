"""A simulator of whole systems: throughput and latency of any number of cells, from costs that were measured.

Each request goes the way that the code goes (`docs/architecture.md`): ACCEPT, CLAIM, batches by the worker's own
decisions, hops between stages, COMMIT, the gateway's events. What takes time is a cost of `costs.py`; nothing else is.
"""
