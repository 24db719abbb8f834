"""Logits by the executor of a converted block folder."""
