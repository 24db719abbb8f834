"""Checkpoints, tokenizers and models that tests make."""
