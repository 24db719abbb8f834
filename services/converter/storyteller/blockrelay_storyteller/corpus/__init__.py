"""Generates the training data: a simulated world, stories about it, questions with answers, and their tokens."""
