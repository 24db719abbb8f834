"""Sizes a system for a model and a load: memory, Redis, disk, network and processes, from measured costs."""
