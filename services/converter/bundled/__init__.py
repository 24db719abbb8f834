"""Makes the bundled model: a world that is simulated, stories told about it, a small Llama trained on them.

Run from `services/converter`: `python -m bundled.train`, `python -m bundled.evaluate`. No service imports this package.
"""
