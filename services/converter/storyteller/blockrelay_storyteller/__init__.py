"""Makes the bundled model: simulates a world, tells stories about it, and trains a small Llama on them.

Run from `services/converter/storyteller`: `python -m blockrelay_storyteller.train`, `python -m
blockrelay_storyteller.evaluate`. No service imports this package.
"""
