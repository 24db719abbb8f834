"""Decides which blocks form each stage, and which worker runs which stage. Pure: workers in, plan out."""
