"""Whole systems of real processes."""
