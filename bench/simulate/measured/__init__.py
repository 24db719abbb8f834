"""A real system under load, and the costs that are taken from it."""
