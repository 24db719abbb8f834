"""Checkpoint in, block folder out."""
