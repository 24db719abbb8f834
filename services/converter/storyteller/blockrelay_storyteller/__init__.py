"""Makes the bundled model: a world that is simulated, stories told about it, a small Llama trained on them.

Run from `services/converter/storyteller`: `python -m blockrelay_storyteller.train`, `python -m
blockrelay_storyteller.evaluate`. No service imports this package.
"""
