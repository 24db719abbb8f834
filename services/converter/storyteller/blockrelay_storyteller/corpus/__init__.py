"""What the storyteller reads: a simulated world, stories told about it, questions, and all of it as tokens."""
