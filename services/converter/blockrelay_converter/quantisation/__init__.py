"""Rounds float weights to integers, and calibrates the rounding with a text (SmoothQuant, GPTQ)."""
